"""How a bundle talks: template, tokenizer and dialect together, from messages to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .bundle import Bundle
from .calls import spoken
from .chat import render
from .dialects import Dialect, load_dialect
from .errors import BundleError
from .messages import Call, Message, Want
from .tokenizer import Tokenizer
from .tools import Tool

__all__ = ["Talk"]


@dataclass(frozen=True)
class Talk:
    """A template, a tokenizer and a dialect that belong together.

    Attributes:
      dialect: How calls are written.
      template: The jinja template.
      tokenizer: The bundle's own.
      stops: Ids that end a reply.
    """

    dialect: Dialect
    template: str
    tokenizer: Tokenizer
    stops: frozenset[int]

    @classmethod
    def of(cls, bundle: Bundle) -> Talk:
        """Read how a bundle talks.

        Raises:
          BundleError: Unknown dialect, or a tokenizer that cannot be read.
        """
        manifest = bundle.manifest
        return cls(
            load_dialect(manifest.dialect),
            bundle.file("template.jinja").read_text(encoding="utf-8"),
            Tokenizer(bundle.file("tokenizer.json")),
            frozenset(manifest.stop_tokens),
        )

    def _render(self, messages: Sequence[Message], tools: Iterable[Tool], *, reply: bool) -> str:
        schemas = [tool.schema() for tool in tools]
        return render(self.template, self.dialect.turns(messages), schemas, reply=reply)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render a conversation up to where the model goes on, outside of any thought.

        Raises:
          BundleError: The template is malformed, refuses the conversation, or drops the tools.
        """
        text = self._render(messages, tools, reply=True)
        think = self.dialect.THINK
        if think and text.rstrip().endswith(think[0]):
            # A template that cannot be told not to think: an empty thought, as templates write one that can.
            text = f"{text.rstrip()}\n\n{think[1]}\n\n"
        return text

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return `text` as token ids."""
        return self.tokenizer.encode(self.text(messages, tools))

    def grammar(self, tools: Sequence[Tool], want: Want) -> str | None:
        """Return the Lark grammar of what may be said, or None where anything may.

        Raises:
          ConstraintError: A tool's schema asks for what the grammar would not keep to.
        """
        controls = self.tokenizer.controls & frozenset(self.dialect.CONTROLS)
        return self.dialect.grammar(tools, want, controls)

    def written(self, tokens: Sequence[int]) -> str:
        """Return the text of a reply with the control tokens that the dialect reads."""
        return self.tokenizer.decode(tokens, keep=self.dialect.CONTROLS)

    def read(self, raw: str, tools: Sequence[Tool], want: Want) -> tuple[str, tuple[Call, ...]]:
        """Split what `written` returned into plain text and calls; there are none where text was wanted.

        Raises:
          ModelError: A call is malformed, or a thought does not end.
        """
        return (spoken(raw, self.dialect.THINK), ()) if want == "text" else self.dialect.parse(raw, tools)

    def answer(self, messages: Sequence[Message], calls: tuple[Call, ...], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens with which a model that answers a conversation with calls would go on.

        They are what the template adds for the assistant's turn, behind what it opens that turn with and up to the
        token that ends it.

        Raises:
          BundleError: The template fails, opens the turn otherwise than it asks for a reply, or ends it with no stop
            token.
        """
        before = self._render(messages, tools, reply=False)
        opening = self.text(messages, tools).removeprefix(before)
        whole = self._render([*messages, Message("assistant", "", calls=calls)], tools, reply=False)
        if not whole.startswith(before):
            raise BundleError("the chat template writes the conversation otherwise once the assistant has answered")
        turn = whole[len(before) :]
        openings = [opening]
        if think := self.dialect.THINK:
            # Most templates leave an empty thought out of turns that are over.
            openings.append(opening.partition(think[0])[0])
        used = next((text for text in openings if turn.startswith(text)), None)
        if used is None:
            raise BundleError(f"the chat template asks for a reply with {opening!r}, but writes it as {turn[:80]!r}")
        tokens = self.tokenizer.encode(turn[len(used) :])
        end = next((index for index, item in enumerate(tokens) if item in self.stops), None)
        if end is None:
            raise BundleError(
                f"the chat template ends a turn of calls with no stop token: {turn[-40:]!r}",
                hint="a reply would never end; convert with another --dialect, or from a whole checkpoint",
            )
        return tokens[:end]
