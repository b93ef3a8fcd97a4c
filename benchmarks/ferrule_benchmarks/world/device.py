"""The state of a simulated device, and the states that tasks start from. Nothing here is a real device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["SCENARIOS", "Contact", "Device", "Mail", "Sent", "facts"]


@dataclass(frozen=True)
class Contact:
    """A person in the address book."""

    name: str
    number: str


@dataclass(frozen=True)
class Mail:
    """A message that was received: its sender, first words, age in days, and size in MB."""

    sender: str
    text: str
    age_days: int
    size_mb: int = 1


@dataclass(frozen=True)
class Sent:
    """A message that left the device."""

    to: str
    text: str


def _inbox() -> tuple[Mail, ...]:
    """Twenty messages; eight of them are older than 30 days."""
    senders = ("Ben", "Chen", "Ana", "Dora", "Emil")
    ages = (1, 2, 3, 5, 6, 8, 9, 11, 14, 17, 20, 24, 31, 38, 45, 60, 75, 90, 120, 200)
    return tuple(Mail(senders[n % len(senders)], f"message {n + 1}", age) for n, age in enumerate(ages))


@dataclass(frozen=True)
class Device:
    """Everything the simulated device holds.

    Attributes:
      wifi: Wi-Fi is switched on; it finds a known network.
      mobile_data: Mobile data is switched on.
      sim: There is a SIM card; without one there is no mobile data.
      airplane_mode: All radios are off, whatever their switches say.
      battery_percent: Charge; the radios do not start at 2 % or less.
      storage_used_mb: Used storage, trash included.
      storage_total_mb: Size of the storage.
      inbox: Messages received, newest first.
      inbox_capacity: Most messages that the inbox holds; when it is full, nothing can be sent.
      trash: Messages deleted, still on the storage.
      sent: Messages that left the device.
      contacts: The address book.
    """

    wifi: bool = True
    mobile_data: bool = False
    sim: bool = False
    airplane_mode: bool = False
    battery_percent: int = 63
    storage_used_mb: int = 11_400
    storage_total_mb: int = 16_000
    inbox: tuple[Mail, ...] = field(default_factory=_inbox)
    inbox_capacity: int = 50
    trash: tuple[Mail, ...] = ()
    sent: tuple[Sent, ...] = ()
    contacts: tuple[Contact, ...] = (
        Contact("Ana", "+43 555 0101"),
        Contact("Ben", "+43 555 0102"),
        Contact("Chen", "+43 555 0103"),
        Contact("Dora", "+43 555 0104"),
    )

    @property
    def online(self) -> bool:
        """Whether data can leave the device."""
        return not self.airplane_mode and (self.wifi or self.mobile_data)

    @property
    def storage_free_mb(self) -> int:
        """Storage that is left, in MB."""
        return self.storage_total_mb - self.storage_used_mb


_READY = Device()

# A start state by name. In all of them a message can be sent in the end, but with a flat battery; with a full storage
# it takes a call that cannot be taken back.
SCENARIOS: Mapping[str, Device] = {
    "ready": _READY,
    "showcase": replace(_READY, wifi=False, inbox_capacity=20),
    "airplane": replace(_READY, wifi=False, airplane_mode=True),
    "full-storage": replace(
        _READY, storage_used_mb=16_000, trash=(Mail("Emil", "holiday film", 12, 800), Mail("Ben", "slides", 40, 120))
    ),
    "flat-battery": replace(_READY, wifi=False, battery_percent=2),
}


def facts(device: Device) -> dict[str, Any]:
    """Return what a status screen shows, as JSON-like data that says it is simulated."""
    return {
        "device": "simulated",
        "wifi": device.wifi,
        "mobile_data": device.mobile_data,
        "sim": device.sim,
        "airplane_mode": device.airplane_mode,
        "battery_percent": device.battery_percent,
        "storage_free_mb": device.storage_free_mb,
        "inbox": f"{len(device.inbox)} of {device.inbox_capacity} messages",
        "trash": len(device.trash),
        "sent": len(device.sent),
    }
