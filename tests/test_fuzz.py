"""The fuzzer: it knows all that is public, sees what it should see, and finds nothing in its first calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import calls, files
from fuzz.programs import Program, all_programs, sizes, without_program

import texvlm

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return all_programs()


def test_everything_public_has_a_program(programs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not without_program(programs)
    monkeypatch.setattr(texvlm, "forgotten", lambda image: image, raising=False)
    assert without_program(programs) == {"forgotten"}


def test_programs_run_with_what_usually_stands_in_them(programs: list[Program]) -> None:
    """Else only refusals would be tried."""
    refused = []
    for program in programs:
        errors = []
        for seed in range(3):  # some sizes may not fit
            given = sizes(calls.random.Random(seed), program.dtypes)
            torch.manual_seed(seed)
            try:
                eval(program.filled(program.holes), {**calls.NAMES, **given, "files": calls.files})
                break
            except Exception as error:
                errors.append(error)
        else:
            refused.append((program.text, errors[0]))
    assert not [r for r in refused if "files." not in r[0] and "pack_cells" not in r[0]], refused
    assert len(refused) < 16, refused


def test_a_call_is_the_same_for_its_number_and_runs_as_printed(programs: list[Program]) -> None:
    for number in range(200):
        call = calls.drawn(programs, programs, 3, number)
        assert call == calls.drawn(programs, programs, 3, number)
        compile(call.code(), "call", "exec")


def test_damage_is_the_same_for_its_number() -> None:
    for kind in files.KINDS:
        assert files.mutated(kind, 5) == files.mutated(kind, 5)
        assert len({files.mutated(kind, seed) for seed in range(20)}) > 5


def test_what_is_not_finite_where_it_belongs_is_none() -> None:
    """A selection's scores beyond its count, and what leaves float16's range in the gradients of a forward that never was."""
    padded = texvlm.select(torch.rand(3, 2, 16), 4, 8)
    assert padded.score.isinf().any()
    assert all(calls.finite(t, False) for t in calls.tensors(padded))
    padded.score[0, 0] = torch.inf
    assert not all(calls.finite(t, False) for t in calls.tensors(padded))
    infinite = torch.full((3,), torch.inf)
    assert calls.finite(infinite.half(), True)
    assert not calls.finite(infinite.half(), False)
    assert not any(calls.finite(t, True) for t in (infinite, infinite.bfloat16(), infinite.half() * 0))


PLANTED = {
    "signal SIGSEGV": "__import__('ctypes').string_at(«0»)",
    "IndexError": "[1][«2»]",
    "memory grows": "[__import__('time').sleep(«.2»), vars(torch).setdefault('_kept', torch.ones(700 << 20, dtype=torch.uint8))]",
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_planted_faults_are_found(wrong: str, tmp_path: Path) -> None:
    """In a process of its own each: what the fuzzer forks must have no threads."""
    code = f"""
import sys
from fuzz import __main__ as fuzz, hostile, programs
fuzz.WARM = 0
fuzz.all_programs = lambda: [programs.Program("planted", {PLANTED[wrong]!r})]
hostile.filling = lambda rng, usual, of: (usual, True)
sys.exit(fuzz.main(["--seconds", "30", "--calls", "12", "--hang", "3", "--out", {str(tmp_path)!r}]))
"""
    done = run("-c", code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert wrong in done.stdout
    assert {p.name for p in tmp_path.iterdir()} & {f"planted-{number}.py" for number in range(12)}


def test_a_large_result_is_no_growth(tmp_path: Path) -> None:
    """While its call is made, it is there."""
    code = f"""
import sys
from fuzz import __main__ as fuzz, hostile, programs
fuzz.WARM = 0
fuzz.all_programs = lambda: [programs.Program("large", "[torch.ones(1 << 30, dtype=torch.uint8), __import__('time').sleep(«.2»)]")]
fuzz.Fuzz.call = lambda self, number: fuzz.drawn(self.often, self.rare, 0, 0) if number % 4 == 3 else fuzz.Call(
    programs.Program("small", "__import__('time').sleep(«.2»)"), {{}}, 0, (".2",), True)
hostile.filling = lambda rng, usual, of: (usual, True)
sys.exit(fuzz.main(["--seconds", "30", "--calls", "12", "--out", {str(tmp_path)!r}]))
"""
    done = run("-c", code)
    assert done.returncode == 0 and "12 calls" in done.stdout, done.stdout + done.stderr


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_thousands_of_calls_find_nothing(tmp_path: Path) -> None:
    """The same on all machines; a slow one makes fewer of them."""
    done = run("-m", "fuzz", "--seconds", "40", "--calls", "4000", "--seed", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
