"""Shards of one embedding end as one process would, whatever their order, and whichever of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.images.embed import embed as run_embed
from ncm_cli.images.options import EmbedOptions, Shard, parse_shard
from ncm_cli.main import run
from ncm_cli.store.journal import journal_folder

from .conftest import contents

OPTIONS = {"batch_size": "4", "model": "pixels:3", "workers": "0", "max_failures": 9}


def broken(pictures: Any) -> Any:
    """Pictures some of which can't be decoded, in the first and the last third."""
    for name in ("2.png", "21.png", "22.png"):
        (pictures.folder / name).write_bytes(b"no image")
    return pictures


def embed(pictures: Any, shard: str | None = None, **changes: Any) -> Any:
    return pictures.embed(shard=shard, **(OPTIONS | changes))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, Any]]:
    def info(path: Path) -> dict[str, Any]:
        capsys.readouterr()
        assert run(["info", str(path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return info


@pytest.mark.parametrize(
    "orders",
    [
        [("2/3", "0/3", "1/3")],
        pytest.param([("0/3", "1/3", "2/3"), ("1/3", "2/3", "0/3")], marks=pytest.mark.slow),
    ],
)
def test_shards_in_any_order_make_the_store_of_one_process(make_pictures: Any, orders: Any) -> None:
    pictures = broken(make_pictures(26))
    embed(pictures, output=pictures.folder / "one.h5")
    single = contents(pictures.folder / "one.h5")
    assert len(single["failed"]) == 3
    for order in orders:
        for at, shard in enumerate(order):
            report = embed(pictures, shard)
            left = sorted(order[at + 1 :])
            assert list(report.unfinished) == left
            assert (report.shard, report.too_many_failed) == (shard if left else None, False)
            assert pictures.output.exists() == (not left)
        assert contents(pictures.output) == single
        assert report.new == 23 and report.written
        assert not journal_folder(pictures.output).exists()
        assert not embed(pictures, order[0]).written  # all that failed is tried again, and is one shard's
        assert contents(pictures.output) == single
        pictures.output.unlink()


@pytest.mark.slow
def test_an_update_by_shards_takes_what_is_there(make_pictures: Any) -> None:
    pictures = make_pictures(30)
    embed(pictures)
    for name in ("3.png", "8.png", "9.png", "28.png"):
        pictures.picture(name)
    pictures.write(pictures.rows[1:])
    before = contents(pictures.output)
    first = embed(pictures, "1/2", batch_size="2")
    assert (first.new, first.unfinished) == (2, ("0/2",))
    assert contents(pictures.output) == before  # whole until the last shard replaces it
    last = embed(pictures, "0/2", batch_size="2")
    assert (last.new, last.reused, last.removed, last.shard) == (4, 25, 1, None)
    embed(pictures, output=pictures.folder / "one.h5")
    assert contents(pictures.output) == contents(pictures.folder / "one.h5")
    assert not embed(pictures, "0/2").written  # nothing to make: there is no shard to wait for
    assert not journal_folder(pictures.output).exists()


@pytest.mark.slow
def test_what_is_there_counts_for_other_numbers_of_shards_and_for_none(make_pictures: Any, told: Any) -> None:
    pictures = broken(make_pictures(26))
    embed(pictures, output=pictures.folder / "one.h5")
    embed(pictures, "1/3")
    embed(pictures, "2/3")
    assert told(journal_folder(pictures.output))["shards"] == {
        "1/3": {"rows": 8, "failed": 0, "done": True},
        "2/3": {"rows": 8, "failed": 2, "done": True},
    }
    again = embed(pictures, "1/2")
    assert (again.new, again.rows, len(again.failed)) == (0, 12, 2)
    assert embed(pictures).new == 23
    assert any("joining the shards: 16 of 26" in note for note in pictures.said.notes)
    assert contents(pictures.output) == contents(pictures.folder / "one.h5")


@pytest.mark.slow
def test_other_settings_and_other_writers_are_refused(make_pictures: Any) -> None:
    pictures = make_pictures(12)
    embed(pictures, "0/2")
    with pytest.raises(MismatchError, match="other settings"):
        embed(pictures, "1/2", model="pixels:2")
    with at_work(pictures, "1/2") as busy:
        with pytest.raises(InputError, match="another process is writing"):
            embed(pictures, "1/2")
        with pytest.raises(InputError, match="another process is writing"):
            embed(pictures)
        assert embed(pictures, "0/2").unfinished == ("1/2",)
        busy("plan of another batch size")
        with pytest.raises(MismatchError, match="different rows, batches"):
            embed(pictures, "0/2")
    assert embed(pictures, "1/2").unfinished == ("0/2",)
    assert embed(pictures, "0/2", batch_size="3").unfinished == ("1/2",)
    assert embed(pictures, "1/2", batch_size="3").written


@contextlib.contextmanager
def at_work(pictures: Any, shard: str) -> Iterator[Callable[[str], None]]:
    """A process that holds a shard; what it gives writes down what that is of."""
    child = f"""if True:
        import contextlib, sys
        from pathlib import Path
        from ncm_cli.images.options import parse_shard
        from ncm_cli.images.embed import ShardLog
        from ncm_cli.store.journal import journal_folder, read_facts, write_part
        output, shard = Path({str(pictures.output)!r}), parse_shard({shard!r})
        with contextlib.ExitStack() as stack:
            ShardLog(output, shard, read_facts(journal_folder(output))["key"], stack, replace=False)
            print("holds", flush=True)
            for line in sys.stdin:
                write_part(output, shard.part, plan=line, done=False)
                print("said", flush=True)"""
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "holds\n"

    def say(plan: str) -> None:
        process.stdin.write(plan + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "said\n"

    with process:
        yield say
        process.stdin.close()


@pytest.mark.parametrize("text", ["3/3", "-1/3", "1", "1/0", "a/b", "1/3/4", "", "½/2"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a shard that can't be read"):
        parse_shard(text)


def test_shards_share_all_batches_in_order() -> None:
    assert parse_shard("0/1") is None and parse_shard(None) is None
    for count, size in ((2, 7), (3, 2), (5, 100)):
        shares = [list(Shard(index, count).of(range(size))) for index in range(count)]
        assert [batch for share in shares for batch in share] == list(range(size))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


KILLER = """if True:
    import os, signal
    from ncm_cli.main import main
    from ncm_cli.store.journal import Journal
    append, calls = Journal.append, []
    def dying(self, *args):
        append(self, *args)
        calls.append(1)
        if os.environ.get("DIES") and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    Journal.append = dying
    main()
"""


@pytest.mark.slow
def test_other_shards_go_on_where_a_killed_one_stopped(make_pictures: Any, told: Any) -> None:
    pictures = broken(make_pictures(60))
    embed(pictures, output=pictures.folder / "one.h5")
    (killer := pictures.folder / "killer.py").write_text(KILLER)
    given = [str(pictures.manifest), "-o", str(pictures.output), "--batch-size", "4", "--model", "pixels:3"]
    given += ["--workers", "0", "--max-failures", "9", "--json"]

    def at_once(count: int, dies: int = -1) -> list[tuple[int, str]]:
        started = [
            subprocess.Popen(
                [sys.executable, str(killer), "embed", *given, "--shard", f"{shard}/{count}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | ({"DIES": "1"} if shard == dies else {}),
            )
            for shard in range(count)
        ]
        outs = [process.communicate(timeout=100)[0] for process in started]
        return [(process.returncode, out) for process, out in zip(started, outs, strict=True)]

    assert [code for code, _ in at_once(3, dies=1)] == [0, -9, 0] and not pictures.output.exists()
    shards = told(journal_folder(pictures.output))["shards"]
    assert shards["1/3"] == {"rows": 6, "failed": 0, "done": False}
    ended = at_once(2)
    assert [code for code, _ in ended] == [0, 0]
    assert max(json.loads(out)["rows"] for _, out in ended) == 57
    assert contents(pictures.output) == contents(pictures.folder / "one.h5")
    assert [path.name for path in pictures.folder.glob(".*")] == []


@pytest.mark.slow  # loads torch
def test_each_process_of_a_machine_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from ncm_cli.progress import SILENT
    from ncm_cli.solvers.device import choose_device

    for name, value in (
        ("is_available", True),
        ("device_count", 2),
        ("get_device_name", "X"),
        ("set_device", None),
    ):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    assert choose_device("auto", "fp32", SILENT) == "cuda:0"
    for rank, device in (("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert choose_device("auto", "fp32", SILENT) == choose_device("cuda", "fp32", SILENT) == device
        assert choose_device("cuda:1", "fp32", SILENT) == "cuda:1"
        assert choose_device("cpu", "fp32", SILENT) == "cpu"


def test_shards_of_another_dtype_do_not_decide_what_is_written(tmp_path: Path) -> None:
    for name in "abcd":
        Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    output, made = tmp_path / "o.h5", []
    for shard, dtype in (("0/2", "float32"), ("1/2", "float16"), ("0/2", "float16")):
        told: dict[str, Any] = {"batch_size": "2", "shard": shard, "dtype": dtype}
        options = EmbedOptions(source=tmp_path, output=output, model="pixels:4", **told)
        made.append(run_embed(options).unfinished)
    assert made == [("1/2",), ("0/2",), ()]
