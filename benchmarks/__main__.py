"""All benchmarks, one process each: python -m benchmarks [names] [--quick] [--json FOLDER] [--threads N]."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    home = Path(__file__).resolve().parent
    known = [p.stem for p in sorted(home.glob("*.py")) if not p.stem.startswith("_")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(known) or "none yet")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FOLDER", type=Path, help="one NAME.json each")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    if strangers := [name for name in args.names if name not in known]:
        parser.error(f"no such benchmark: {', '.join(strangers)} (there are: {', '.join(known)})")
    failed = []
    for name in args.names or known:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--quick"] * args.quick + ["--strict"] * args.strict
        command += ["--threads", str(args.threads)] if args.threads else []
        if args.json:
            args.json.mkdir(parents=True, exist_ok=True)
            command += ["--json", str((args.json / f"{name}.json").resolve())]
        print(f"== {name}", flush=True)
        if subprocess.run(command, cwd=home.parent, check=False).returncode != 0:
            failed.append(name)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
