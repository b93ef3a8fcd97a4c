"""The loop: plan, act, read the result, recover, answer. Every turn of it is an immutable step.

What the loop guarantees with any model, however small:

* A call that failed is not run again, unchanged, until something changed; the model is told why and asked again.
* A tool that cannot be taken back runs only after a person said yes.
* A closing text is not believed while the last action stands failed: it goes back once, then the run ends as given up.
* Every run ends: done, given up with a report of what stands in the way, or at a limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import ModelError, ToolError, UsageError
from .messages import Call, Message, Reply, Usage, Want
from .models import Model
from .recovery import Failure, Recovery
from .steps import Ending, Outcome, Step, StepKind
from .tools import Tool, Toolbox, check_arguments, with_defaults

__all__ = ["SYSTEM", "Agent", "AgentLimits", "Outcome", "Step"]

SYSTEM = (
    "You act on a device by calling tools. Only a tool's result shows that something was done. "
    "When a call fails, read its error, remove the cause with another tool, then try again. "
    "Never repeat a failed call unchanged. When nothing is left to try, say what stands in the way. "
    "When the request is done, answer in one short sentence."
)

# A longer result is cut, openly, so that one tool cannot fill the context.
_RESULT_CHARACTERS = 4000


@dataclass(frozen=True)
class AgentLimits:
    """What a run may take.

    Attributes:
      steps: Most replies of the model.
      seconds: Most wall time, looked at before each reply and each call; neither is interrupted.
      repairs: Times that the model is asked again, without a change in between, after a reply that was refused.
    """

    steps: int = 12
    seconds: float = 600.0
    repairs: int = 2

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.seconds > 0 or self.repairs < 0:
            raise UsageError(
                f"limits of {self.steps} steps, {self.seconds:g} s and {self.repairs} repairs cannot be kept",
                hint="at least 1 step, more than 0 s, and 0 repairs or more",
            )


class Agent:
    """Carries out requests with a model and tools."""

    def __init__(
        self,
        model: Model,
        toolbox: Toolbox,
        *,
        limits: AgentLimits | None = None,
        confirm: Callable[[Call, Tool], bool] | None = None,
        system: str = "",
        first: Want = "either",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set an agent up.

        Args:
          model: What decides.
          toolbox: What it can do.
          limits: What a run may take; None for the defaults.
          confirm: Asks a person about a call of an `irreversible` tool, with all its arguments; only True permits it.
            None: none of them is ever run.
          system: The caller's own system text, behind the loop's.
          first: What the first reply may be; `call` makes a weak model act.
          clock: Seconds, monotonic.
        """
        self.model = model
        self.toolbox = toolbox
        self.limits = limits or AgentLimits()
        self.confirm = confirm
        self.system = f"{SYSTEM}\n\n{system.strip()}".strip()
        self.first: Want = first
        self.clock = clock

    def run(self, request: str) -> Outcome:
        """Carry a request out.

        Raises:
          UsageError: The request is empty.
          ContextError: The conversation no longer fits the model's context.
        """
        return Outcome.of(self.events(request))

    def events(self, request: str) -> Iterator[Step]:
        """Carry a request out, a step at a time as each happens; the last one ends the run.

        Raises:
          UsageError: The request is empty; raised here, before anything runs.
          ContextError: The conversation no longer fits the model's context.
        """
        if not request.strip():
            raise UsageError("the request is empty", hint='say what to do: ferrule run BUNDLE "turn the Wi-Fi on"')
        return _Run(self, request).steps()


class _Run:
    """One request in work: its conversation, its failures, and what is left of the limits."""

    def __init__(self, agent: Agent, request: str) -> None:
        self._agent = agent
        self._messages = [Message("system", agent.system), Message("user", request)]
        self._recovery = Recovery(agent.toolbox)
        self._offered: tuple[Tool, ...] = tuple(agent.toolbox)
        self._want: Want = agent.first
        self._started = agent.clock()
        self._index = 0
        self._replies = 0
        self._acts = 0
        self._failures = 0
        self._doubted = False
        self._ended = False

    def steps(self) -> Iterator[Step]:
        while not self._ended:
            if limit := self._over():
                yield self._end("limit", f"stopped at the limit of {limit}; {self._recovery.report()}")
            else:
                yield from self._turn()

    def _step(self, kind: StepKind, **values: Any) -> Step:
        self._index += 1
        return Step(self._index, kind, **values)

    def _end(self, kind: Ending, text: str, **values: Any) -> Step:
        self._ended = True
        return self._step(kind, text=text, **values)

    def _late(self) -> bool:
        return self._agent.clock() - self._started >= self._agent.limits.seconds

    def _over(self) -> str:
        limits = self._agent.limits
        if self._replies >= limits.steps:
            return f"{limits.steps} replies" if limits.steps > 1 else "1 reply"
        return f"{limits.seconds:g} s" if self._late() else ""

    def _tell(self, call: Call, body: dict[str, Any]) -> None:
        self._messages.append(Message("tool", json.dumps(body, ensure_ascii=False), name=call.name))

    def _turn(self) -> Iterator[Step]:
        """Ask the model once, and do what it says."""
        self._replies += 1
        try:
            reply = self._agent.model.reply(tuple(self._messages), self._offered, self._want)
        except ModelError as error:
            yield from self._unusable(str(error), None)
            return
        if not reply.calls and not reply.text.strip():
            yield from self._unusable("neither a call nor a text", reply.usage)
            return
        self._offered, self._want = tuple(self._agent.toolbox), "either"
        if reply.calls:
            yield from self._act(reply)
        else:
            yield self._answer(reply)

    def _unusable(self, why: str, usage: Usage | None) -> Iterator[Step]:
        self._messages += [
            Message("assistant", "(a reply that could not be used)"),
            Message("user", f"Your last reply could not be used: {why}. Answer with one tool call or plain text."),
        ]
        yield self._step("refused", usage=usage, note=f"the reply could not be used: {why}")
        yield from self._repair(f"the model's replies could not be used: {why}")

    def _repair(self, why: str) -> Iterator[Step]:
        """Count one more reply that was refused; end the run when there were too many."""
        self._recovery.repairs += 1
        if self._recovery.repairs > self._agent.limits.repairs:
            yield self._end("gave_up", f"{why}; {self._recovery.report()}")

    def _act(self, reply: Reply) -> Iterator[Step]:
        """Run a reply's calls in order, up to the first that fails or is refused."""
        self._messages.append(Message("assistant", reply.text, calls=reply.calls))
        for place, call in enumerate(reply.calls):
            if self._late():
                return
            # The reply's words and its cost belong to its first call.
            said = {"text": reply.text.strip(), "usage": reply.usage} if place == 0 else {}
            forbidden = self._recovery.refusal(call)
            step = self._refuse(call, forbidden, said) if forbidden else self._invoke(call, said)
            yield step
            if step.failure is None:
                continue
            for other in reply.calls[place + 1 :]:
                self._tell(other, {"refused": "not run: a call before it in the same reply did not succeed"})
                yield self._step("refused", call=other, note="a call before it in the same reply did not succeed")
            if forbidden:
                yield from self._repair("the same failed call was asked for again and again, and not run")
            break
        if not self._ended and (cycle := self._recovery.cycle()):
            what = " and ".join(json.loads(key)["name"] for key in cycle)
            yield self._end("gave_up", f"{what} went round in a circle; {self._recovery.report()}")

    def _refuse(self, call: Call, failure: Failure, said: dict[str, Any]) -> Step:
        """Do not run a call that failed before; offer next what could help it."""
        why = "the same call failed before and nothing changed since"
        helpers = self._recovery.helpers(failure)
        if helpers:
            self._offered = tuple(helpers)
            advice = f"call {' or '.join(tool.name for tool in helpers)} first, or say what stands in the way"
        else:
            advice = "try another way, or say what stands in the way"
        self._tell(call, {"refused": f"not run: {why}", "before": failure.told(), "next": advice})
        return self._step("refused", call=call, failure=failure, note=f"{why}; {advice}", **said)

    def _invoke(self, call: Call, said: dict[str, Any]) -> Step:
        self._acts += 1
        started = None
        try:
            self._admit(call)
            started = self._agent.clock()
            result = self._agent.toolbox.invoke(call)
        except ToolError as error:
            taken = None if started is None else self._agent.clock() - started
            self._failures += 1
            failure = self._recovery.failed(call, error)
            self._tell(call, failure.told())
            return self._step("act", call=call, failure=failure, tool_s=taken, **said)
        taken = self._agent.clock() - started
        self._recovery.succeeded(call, result)
        self._tell(call, {"result": _clip(result)})
        return self._step("act", call=call, result=result, tool_s=taken, **said)

    def _admit(self, call: Call) -> None:
        """Look whether a call can be run; ask a person about one that cannot be taken back.

        Raises:
          ToolError: Unknown tool, arguments that do not fit, or not permitted.
        """
        item = self._agent.toolbox[call.name]
        whole = with_defaults(item, Call(call.name, check_arguments(item, call.arguments)))
        if item.effect != "irreversible":
            return
        if self._agent.confirm is None or self._agent.confirm(whole, item) is not True:
            asked = "nobody could be asked" if self._agent.confirm is None else "the person said no"
            raise ToolError(f"it cannot be taken back, and {asked}", cause="not_permitted")

    def _answer(self, reply: Reply) -> Step:
        """Take a closing text, unless the last action stands failed."""
        self._messages.append(Message("assistant", reply.text))
        failures = self._recovery.in_the_way
        if not failures:
            return self._end("done", reply.text.strip(), usage=reply.usage, note=self._summary())
        facts = "; ".join(failure.line() for failure in failures)
        if self._doubted:
            note = f"the model's last words: {reply.text.strip()}"
            return self._end("gave_up", f"not done; {self._recovery.report()}", usage=reply.usage, note=note)
        self._doubted = True
        self._messages.append(
            Message("user", f"This is not done. {facts}. Take another step, or say plainly what stands in the way.")
        )
        note = f"sent back once: the last action did not succeed: {facts}"
        return self._step("doubted", text=reply.text.strip(), usage=reply.usage, note=note)

    def _summary(self) -> str:
        if not self._acts:
            return "no tool was called"
        changes = len(self._recovery.changes)
        return f"tool calls: {self._acts}, failed: {self._failures}, changed or sent something: {changes}"


def _clip(result: Any) -> Any:
    text = json.dumps(result, ensure_ascii=False)
    if len(text) <= _RESULT_CHARACTERS:
        return result
    return f"{text[:_RESULT_CHARACTERS]}… (cut: {len(text)} characters in all)"
