"""Converting: everything from a checkpoint to a bundle that is whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ferrule_runtime import __version__
from ferrule_runtime.bundle import MANIFEST, Bundle, File, Manifest, file_sha256
from ferrule_runtime.commandline import human
from ferrule_runtime.errors import BundleError, RecipeError, UsageError
from ferrule_targets.target import Target

from .apart import apart
from .archs import build
from .check import gate
from .checkpoint import Checkpoint, is_there
from .formats import export, memory_facts
from .graph import Graph
from .kept import tally
from .recipe import Recipe, apply, describe
from .rehearsal import rehearse

__all__ = ["Options", "convert"]

Progress = Callable[[str], None]

# Tables of angles are made for this many positions at most, whatever the model was trained for.
_CONTEXT = 8192


@dataclass(frozen=True)
class Options:
    """What the user can decide about a conversion.

    Attributes:
      context: Positions that the bundle must reach; None takes the model's, up to 8,192.
      dialect: The tool-call dialect; None detects it.
      fidelity: Whether to compare with the float model.
      max_kl: Mean KL above which the conversion fails; None records it only.
    """

    context: int | None = None
    dialect: str | None = None
    fidelity: bool = True
    max_kl: float | None = None


def _legal(graph: Graph, recipe: Recipe, target: Target) -> None:
    """Refuse a recipe that the target's kernels do not execute well, before anything is written."""
    for weight in graph.weights():
        scheme = weight.scheme
        if scheme is None:
            continue
        if scheme.bits not in target.bits or scheme.group not in target.groups:
            raise RecipeError(
                f"recipe `{recipe.name}` stores `{weight.name}` in {scheme.bits} bits by groups of {scheme.group}; "
                f"target `{target.name}` takes {'/'.join(map(str, target.bits))} bits "
                f"by groups of {'/'.join(map(str, target.groups))}",
                hint=f"`ferrule recipes --target {target.name}` lists those that fit",
            )


# What renaming a folder onto something that stands there says, by what it is.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def _refuse_taken(out: Path) -> None:
    if out.name in ("", ".."):
        raise UsageError(f"`{out}` names no new folder", hint="choose another -o")
    # A link that leads nowhere is in the way, too.
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists already", hint="choose another -o, or remove it first")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` that becomes it at the end, in one step, or vanishes.

    Of several at once the first to end gets the name; the others are refused then.
    """
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        # Linux would put a folder in an empty one's place; whoever made that has taken the name.
        _refuse_taken(out)
        try:
            partial.rename(out)
        except OSError as error:
            if error.errno in _TAKEN:
                _refuse_taken(out)
            raise
        _flush(out.parent)
    except OSError as error:
        hint = "choose another -o"
        if out.parent.is_dir():
            hint = f"{human(shutil.disk_usage(out.parent).free)} are free there"
        raise BundleError(f"{out}: cannot be written: {error.strerror or error}", hint=hint) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _made() -> dict[str, Any]:
    tools = ("numpy", "onnx", "onnxruntime", "gguf", "tokenizers")
    return {
        "ferrule": __version__,
        "tools": {name: version(name) for name in tools},
        "python": platform.python_version(),
        "command": shlex.join(["ferrule", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _bits_per_weight(graph: Graph) -> float:
    """Return bits per weight of the matrices as stored: integers, scales, zero points; embedding and head included."""
    matrices = [weight for weight in graph.weights() if len(weight.shape) == 2]
    return 8 * sum(weight.stored_bytes for weight in matrices) / sum(weight.count for weight in matrices)


def _weight_bytes(graph: Graph) -> float:
    """Return about how many bytes the weights take as stored."""
    return _bits_per_weight(graph) / 8 * graph.parameters


def _room(graph: Graph, out: Path) -> None:
    """Refuse before writing when the disk cannot hold the weights."""
    needed = int(_weight_bytes(graph))
    place = next(parent for parent in out.absolute().parents if is_there(parent))
    if (free := shutil.disk_usage(place).free) < needed:
        raise BundleError(
            f"{out}: {human(needed)} needed, {human(free)} free on its disk", hint="make room, or another -o"
        )


def convert(
    checkpoint: Checkpoint, target: Target, recipe: Recipe, out: Path, options: Options, progress: Progress
) -> Bundle:
    """Convert a checkpoint into a bundle.

    Weights are streamed: memory holds one at a time. The bundle appears under its name only when it is whole, checked
    against the float model, and on the disk.

    Args:
      checkpoint: What to convert.
      target: The kind of board it is for.
      recipe: How to quantise it.
      out: The bundle's folder; must not exist.
      options: What the user decided.
      progress: Told what is being done.

    Raises:
      UsageError: `out` exists.
      RecipeError: The recipe does not fit the weights or the target.
      CheckpointError: The checkpoint lacks something, or holds values that are not finite.
      BundleError: The disk is full, or the gate failed.
    """
    _refuse_taken(out)
    if options.max_kl is not None and not options.fidelity:
        raise UsageError("--max-kl needs the fidelity check", hint="leave --no-fidelity out")
    form = target.forms[0]
    plain = build(checkpoint)
    graph = apply(plain, recipe)
    _legal(graph, recipe, target)
    context = options.context or min(plain.context, _CONTEXT)
    if context > plain.context:
        raise UsageError(
            f"a context of {context} tokens; the model reaches {plain.context}", hint="a smaller --context"
        )
    matrices = tally(graph)
    _room(graph, out)
    with _beside(out) as folder:
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_text(checkpoint.tokenizer_json, encoding="utf-8")
        progress(f"writing {human(_weight_bytes(graph))} of weights as {recipe.name}, checking template and tool calls")
        for line in matrices.lines():
            progress(line)
        with ThreadPoolExecutor(2) as pool:
            # Both take one core for seconds. Sent without the tensors, which know where they lie but cannot be sent.
            sent, rows = replace(checkpoint, tensors={}), graph.head.shape[0]
            talk = pool.submit(apart, rehearse, sent, options.dialect, tokenizer, rows, context, plain.parameters)
            identity = pool.submit(checkpoint.sha256)
            exported = export(form, graph, folder, context, target.accuracy_level)
            rehearsed = talk.result()
        chat = rehearsed.chat
        (folder / "template.jinja").write_text(chat.template, encoding="utf-8")
        manifest = Manifest(
            name=f"{out.name}",
            checkpoint={
                "name": checkpoint.name,
                "file": checkpoint.path.name,
                "sha256": identity.result(),
                "stored": checkpoint.stored,
                "licence": checkpoint.licence,
                "parameters": plain.parameters,
            },
            architecture={"family": plain.family, **plain.facts},
            recipe={
                **describe(recipe),
                "bits_per_weight": round(_bits_per_weight(graph), 3),
                "matrices": matrices.to_json(),
            },
            target=target.name,
            form=form,
            engine=exported.engine,
            features=target.features,
            context=context,
            dialect=chat.dialect,
            stop_tokens=chat.stop_tokens,
            tables=exported.tables,
            memory=memory_facts(form, graph, context, len(checkpoint.tokenizer_json.encode())),
            fidelity={"skipped": "--no-fidelity"},
            made=_made() | {"dialect": chat.note, "notes": list(checkpoint.notes)},
            files={},
        )
        names = [*exported.files, "tokenizer.json", "template.jinja"]
        # The gate reads the parts by their names; they are hashed once, when all are there.
        manifest = replace(manifest, files={name: File(0, "") for name in names})
        checked = gate(Bundle(folder, manifest, ""), checkpoint, graph, rehearsed, options.fidelity, progress)
        if options.max_kl is not None and checked.fidelity["kl"] > options.max_kl:
            raise BundleError(
                f"mean KL to the float model is {checked.fidelity['kl']:.4f}, --max-kl allows {options.max_kl:.4f}",
                hint="use more bits",
            )
        manifest = replace(manifest, fidelity=checked.fidelity, files=_hashed(folder, [*names, *checked.files]))
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle(out, manifest, file_sha256(out / MANIFEST))


def _hashed(folder: Path, names: list[str]) -> dict[str, File]:
    return {name: File((folder / name).stat().st_size, file_sha256(folder / name)) for name in names}
