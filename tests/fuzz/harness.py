"""One target under atheris: `python harness.py TARGET SECONDS PREFIX`."""

import importlib
import os
import resource
import sys
import tempfile
from pathlib import Path

import atheris

from ferrule_runtime.errors import FerruleError

# Bytes of one input, which the seeds are well below, and of the whole process; the libraries alone take 300 MB.
LONGEST, MEMORY = 1 << 16, 1 << 30


def main() -> None:
    name, seconds, prefix = sys.argv[1:4]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory(prefix="ferrule-fuzz-") as scratch:
        os.environ |= {"FERRULE_STATE": f"{scratch}/state", "FERRULE_CACHE": f"{scratch}/cache"}
        os.chdir(scratch)
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        # The libraries' own modules are not followed: it is ours that inputs are to reach all of.
        with atheris.instrument_imports(include=["ferrule_convert", "ferrule_runtime"]):
            target = importlib.import_module(name)
            target.seeds(corpus)
            # Good inputs are taken; what is imported on the way is followed, too.
            for seed in corpus.iterdir():
                target.one(seed.read_bytes())
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

        def one(data: bytes) -> None:
            try:
                target.one(data)
            except FerruleError as error:
                # It is shown to a user: nothing that a terminal would obey.
                if not str(error).isprintable():
                    raise AssertionError(f"not printable: {str(error)!a}") from error

        options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=10", f"-rss_limit_mb={MEMORY >> 20}"]
        atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={prefix}", "-print_final_stats=1", str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
