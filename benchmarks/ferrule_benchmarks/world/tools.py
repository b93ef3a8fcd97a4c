"""Tools over the simulated device: the only way its state changes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any, cast

from ferrule_runtime.errors import ToolError
from ferrule_runtime.registry import unknown
from ferrule_runtime.tools import tool

from .device import Device, Mail, Sent, facts

__all__ = ["World"]

# The radios do not start at this charge or below, in percent.
_BATTERY_FLOOR = 2
# What the copy of a sent message takes, in MB.
_SENT_MB = 1
# Most messages that one look at the inbox lists.
_LISTED = 10


class World:
    """A simulated device and the tools that act on it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def device(self) -> Device:
        """The state now."""
        return self._device

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON-like data, so that a task's end can be checked by what is so."""
        state = {"device": "simulated", **asdict(self._device), "online": self._device.online}
        return cast(dict[str, Any], json.loads(json.dumps(state)))

    def _change(self, **values: Any) -> None:
        self._device = replace(self._device, **values)

    @tool(effect="read")
    def device_status(self) -> dict[str, Any]:
        """Show the network, battery, storage and inbox of the device."""
        return facts(self._device)

    @tool(effect="read", provides=["known_contact"])
    def list_contacts(self) -> list[str]:
        """List the names in the address book."""
        return [contact.name for contact in self._device.contacts]

    @tool(effect="read")
    def read_inbox(self) -> dict[str, Any]:
        """Show the newest messages in the inbox."""
        inbox = self._device.inbox
        shown = [{"from": mail.sender, "text": mail.text, "age_days": mail.age_days} for mail in inbox[:_LISTED]]
        return {"messages": len(inbox), "capacity": self._device.inbox_capacity, "newest": shown}

    @tool(effect="egress", requires=["known_contact", "network", "inbox_space", "storage"])
    def send_message(
        self, to: Annotated[str, "name of a contact"], text: Annotated[str, "what the message says"]
    ) -> str:
        """Send a text message to a contact."""
        device = self._device
        name = self._contact(to)
        if not text.strip():
            raise ToolError("the message has no text", cause="bad_arguments")
        if not device.online:
            raise ToolError("the device is not connected to a network", cause="network_off", missing="network")
        if len(device.inbox) >= device.inbox_capacity:
            raise ToolError(
                f"the inbox is full, {len(device.inbox)} of {device.inbox_capacity} messages",
                cause="inbox_full",
                missing="inbox_space",
            )
        if device.storage_free_mb < _SENT_MB:
            raise ToolError(
                f"the storage is full, {device.storage_used_mb} of {device.storage_total_mb} MB",
                cause="storage_full",
                missing="storage",
            )
        self._change(sent=(*device.sent, Sent(name, text)), storage_used_mb=device.storage_used_mb + _SENT_MB)
        return f"the message was sent to {name}"

    def _contact(self, name: str) -> str:
        names = [contact.name for contact in self._device.contacts]
        for known in names:
            if known.casefold() == name.strip().casefold():
                return known
        error = unknown("contact", name, names)
        raise ToolError(str(error), cause="unknown_contact", missing="known_contact", hint=error.hint)

    def _radio(self, what: str) -> None:
        """Fail where a radio cannot be switched on."""
        if self._device.airplane_mode:
            raise ToolError(f"{what} stays off in airplane mode", cause="airplane_mode_on", missing="radio")
        if self._device.battery_percent <= _BATTERY_FLOOR:
            raise ToolError(
                f"{what} does not start at {self._device.battery_percent} % battery",
                cause="battery_low",
                missing="charge",
            )

    @tool(requires=["radio", "charge"], provides=["network"])
    def set_wifi(self, on: bool) -> str:
        """Turn Wi-Fi on or off."""
        if on:
            self._radio("Wi-Fi")
        self._change(wifi=on)
        return f"Wi-Fi is {'on and connected' if on else 'off'}"

    @tool(requires=["radio", "charge", "sim"], provides=["network"])
    def set_mobile_data(self, on: bool) -> str:
        """Turn mobile data on or off."""
        if on:
            self._radio("mobile data")
            if not self._device.sim:
                raise ToolError("there is no SIM card", cause="no_sim", missing="sim")
        self._change(mobile_data=on)
        return f"mobile data is {'on' if on else 'off'}"

    @tool(provides=["radio"])
    def set_airplane_mode(self, on: bool) -> str:
        """Turn airplane mode on or off. While it is on, all radios are off."""
        off = {"wifi": False, "mobile_data": False} if on else {}
        self._change(airplane_mode=on, **off)
        return f"airplane mode is {'on' if on else 'off'}"

    @tool(provides=["inbox_space"])
    def delete_messages(self, older_than_days: Annotated[int, "keep messages this old or newer"] = 30) -> str:
        """Move old messages from the inbox to the trash."""
        device = self._device
        if older_than_days < 0:
            raise ToolError(f"older_than_days is {older_than_days}, expected 0 or more", cause="bad_arguments")
        old = tuple(mail for mail in device.inbox if mail.age_days > older_than_days)
        if not old:
            raise ToolError(f"no message is older than {older_than_days} days", cause="nothing_to_delete")
        kept = tuple(mail for mail in device.inbox if mail.age_days <= older_than_days)
        self._change(inbox=kept, trash=(*device.trash, *old))
        return f"{len(old)} messages were moved to the trash, {len(kept)} are left in the inbox"

    @tool(effect="irreversible", provides=["storage"])
    def empty_trash(self) -> str:
        """Delete everything in the trash for good, to free storage."""
        trash: tuple[Mail, ...] = self._device.trash
        if not trash:
            raise ToolError("the trash is empty", cause="nothing_to_delete")
        freed = sum(mail.size_mb for mail in trash)
        self._change(trash=(), storage_used_mb=self._device.storage_used_mb - freed)
        return f"{len(trash)} messages were deleted for good, {freed} MB are free again"
