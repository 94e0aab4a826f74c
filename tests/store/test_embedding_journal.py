"""Finished rows survive kills, torn writes and rotten bytes; they are never mixed with another run's."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError
from ncm_cli.store import recognise
from ncm_cli.store.columns import ImageFile
from ncm_cli.store.journal import Journal, journal_folder, read_facts

KEY = {"encoder": {"model": "pixels:8", "precision": "fp32"}, "format": 1}


def row(i: int) -> ImageFile:
    return ImageFile(f"id {i} é", f"/p/{i}.png", 100 + i, 10**18 + i, f"{i:064x}")


def features(start: int, stop: int, dim: int = 5) -> np.ndarray:
    numbers = np.arange(start, stop, dtype=np.float32)
    return np.sin(numbers[:, None] * (1 + np.arange(dim, dtype=np.float32)))


def filled(output: Path, rows: int = 30, step: int = 7) -> Path:
    with Journal.open(output, KEY) as journal:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            journal.append([row(i) for i in range(start, stop)], features(start, stop))
    return journal_folder(output)


def test_rows_come_back_in_any_order(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    assert filled(output) == tmp_path / ".f.h5.partial"
    with Journal.open(output, KEY) as journal:
        assert (journal.rows, journal.dim, journal.damaged) == (30, 5, 0)
        assert journal.lookup("id 3 é") == row(3)
        assert journal.lookup("nobody") is None
        order = np.random.default_rng(0).permutation(30)
        np.testing.assert_array_equal(journal.take([row(i).id for i in order]), features(0, 30)[order])
        assert [journal.lookup(row(i).id) for i in range(30)] == [row(i) for i in range(30)]
        with pytest.raises(KeyError, match="nobody"):
            journal.take(["nobody"])
        journal.append([row(30)], features(30, 31))
        np.testing.assert_array_equal(journal.take([row(30).id, row(0).id]), features(0, 31)[[30, 0]])


def test_the_last_row_of_an_id_counts(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    filled(output)
    newer = ImageFile(row(3).id, "/p/new.png", 1, 2, "0" * 64)
    with Journal.open(output, KEY) as journal:
        journal.append([newer], np.full((1, 5), 7.0))
        assert journal.lookup(newer.id) == newer
    with Journal.open(output, KEY) as journal:
        assert journal.lookup(newer.id) == newer
        assert (journal.take([newer.id]) == 7).all()


def test_rows_between_lookups(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    with Journal.open(output, KEY) as journal:
        for i in range(23):
            journal.append([row(i)], features(i, i + 1))
            assert journal.lookup(row(i // 2).id) == row(i // 2)


@pytest.mark.parametrize("share", np.linspace(0, 1, 9))
def test_a_torn_end_is_dropped_and_written_anew(tmp_path: Path, share: float) -> None:
    """h5py/h5py#879, TE_Density#149."""
    output = tmp_path / "f.h5"
    log = filled(output) / "rows.log"
    size = log.stat().st_size
    os.truncate(log, int(size * share))
    with Journal.open(output, KEY) as journal:
        whole = journal.rows
        assert whole == int(30 * share) or whole == int(30 * share) - 1
        assert journal.damaged == 0
        journal.append([row(i) for i in range(whole, 30)], features(whole, 30))
    with Journal.open(output, KEY) as journal:
        assert journal.rows == 30
        np.testing.assert_array_equal(journal.take([row(i).id for i in range(30)]), features(0, 30))


@pytest.mark.slow
def test_a_rotten_byte_costs_one_row_at_most(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    log = filled(output) / "rows.log"
    good = log.read_bytes()
    rng = np.random.default_rng(0)
    lost = counted = 0
    for position in rng.integers(0, len(good), 100).tolist():
        bad = bytearray(good)
        bad[position] ^= int(rng.integers(1, 256))
        log.write_bytes(bad)
        with Journal.open(output, KEY) as journal:
            assert journal.rows >= 29
            lost += 30 - journal.rows
            counted += journal.damaged
            for i in range(30):
                found = journal.lookup(row(i).id)
                if found is not None:
                    assert found == row(i)
                    np.testing.assert_array_equal(journal.take([found.id]), features(i, i + 1))
        log.write_bytes(good)
    assert lost == 100
    # A last row whose length has changed looks as if its writer had been killed.
    assert counted >= 98


def test_damaged_rows_are_counted(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    log = filled(output) / "rows.log"
    raw = bytearray(log.read_bytes())
    starts = [at for at in range(len(raw)) if raw.startswith(b"NCMROW1\n", at)]
    for at in (starts[3], starts[8] + 9, starts[9] + 12, starts[20] + 40, len(raw) - 1):
        raw[at] ^= 1
    log.write_bytes(raw)
    assert [read_facts(journal_folder(output))[name] for name in ("rows", "damaged")] == [25, 5]
    with Journal.open(output, KEY) as journal:
        assert (journal.rows, journal.damaged) == (25, 5)
        assert journal.lookup(row(3).id) is None and journal.lookup(row(4).id) == row(4)
        journal.append([row(29)], features(29, 30))
    with Journal.open(output, KEY) as journal:
        assert (journal.rows, journal.damaged) == (26, 4)


def test_features_that_hold_the_records_mark(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    tricky = np.frombuffer(b"NCMROW1\n" * 2, "<f4").reshape(1, 4)
    with Journal.open(output, KEY) as journal:
        journal.append([row(0)], tricky)
        journal.append([row(1)], tricky)
    log = journal_folder(output) / "rows.log"
    raw = bytearray(log.read_bytes())
    raw[0] ^= 1
    log.write_bytes(raw)
    with Journal.open(output, KEY) as journal:
        # The marks inside the damaged row pass for rows that are damaged too.
        assert (journal.rows, journal.damaged) == (1, 3)
        assert journal.lookup(row(1).id) == row(1)


def test_damage_after_opening_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    log = filled(output) / "rows.log"
    with Journal.open(output, KEY) as journal:
        raw = bytearray(log.read_bytes())
        raw[-1] ^= 1
        log.write_bytes(raw)
        with pytest.raises(InputError, match="damaged"):
            journal.take([row(29).id])


def test_other_settings_are_refused_by_field(tmp_path: Path) -> None:
    """pytorch/vision#6234."""
    output = tmp_path / "f.h5"
    folder = filled(output)
    other = {**KEY, "encoder": {"model": "pixels:16", "precision": "fp32"}}
    with pytest.raises(MismatchError, match="other settings") as error:
        Journal.open(output, other)
    assert error.value.found == "encoder.model: pixels:8 then, pixels:16 now"
    assert str(folder) in str(error.value.fix)
    with Journal.open(output, KEY) as journal:
        assert journal.rows == 30


def test_a_folder_without_a_key_is_not_trusted(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    folder = filled(output)
    (folder / "journal.json").unlink()
    with Journal.open(output, KEY) as journal:
        assert journal.rows == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b'{"ncm_format": "ncm-journal", "ncm_format_version": 1}']
)
def test_a_damaged_key_is_refused(tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "f.h5"
    (filled(output) / "journal.json").write_bytes(content)
    with pytest.raises(InputError, match=r"journal|JSON|empty"):
        Journal.open(output, KEY)


def test_a_future_journal_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    facts = filled(output) / "journal.json"
    facts.write_text(facts.read_text().replace('"ncm_format_version": 2', '"ncm_format_version": 3'))
    with pytest.raises(InputError, match="version"):
        Journal.open(output, KEY)


def test_a_key_that_was_edited_is_refused_with_the_way_on(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    facts = filled(output) / "journal.json"
    facts.write_text(facts.read_text().replace("pixels:8", "pixels:4"))
    with pytest.raises(InputError, match="a journal that was changed after it was written") as error:
        Journal.open(output, {**KEY, "encoder": {"model": "pixels:4", "precision": "fp32"}})
    assert f"delete the folder {facts.parent}" in str(error.value.fix)


def test_a_journal_without_a_digest_is_refused_with_the_way_on(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    facts = filled(output) / "journal.json"
    body = json.loads(facts.read_text())
    del body["content_sha256"]
    facts.write_text(json.dumps({**body, "ncm_format_version": 1}))
    with pytest.raises(InputError, match="a journal that was changed") as error:
        Journal.open(output, KEY)
    assert f"delete the folder {facts.parent}" in str(error.value.fix)


def test_discard_removes_everything(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    filled(output)
    Journal.open(output, KEY).discard()
    assert list(tmp_path.iterdir()) == []


def test_facts_for_people(tmp_path: Path) -> None:
    folder = filled(tmp_path / "f.h5")
    before = (folder / "rows.log").stat().st_mtime_ns
    found = read_facts(folder)
    assert (found["rows"], found["dim"], found["key"], found["output"]) == (30, 5, KEY, "f.h5")
    assert (folder / "rows.log").stat().st_mtime_ns == before
    assert recognise(folder) == "journal"
    with pytest.raises(InputError, match="interrupted") as error:
        recognise(tmp_path / "f.h5")
    assert str(folder) in str(error.value.fix)


@pytest.mark.parametrize("whole", [0, 1, 100])
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    output = tmp_path / "f.h5"
    filled(output)
    with Journal.open(output, KEY) as journal:
        log = journal._log

        class Full:
            def write(self, data: memoryview) -> int:
                if len(data) <= 200 - whole:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return log.write(data[:whole] if whole else data[:1])

            def __getattr__(self, name: str) -> object:
                return getattr(log, name)

        monkeypatch.setattr(journal, "_log", Full())
        many = [row(i) for i in range(30, 40)]
        with pytest.raises(InputError, match="disk is full"):
            for _ in range(10):
                journal.append(many[:1], features(30, 31))
        monkeypatch.setattr(journal, "_log", log)
        journal.append(many, features(30, 40))
    with Journal.open(output, KEY) as journal:
        np.testing.assert_array_equal(journal.take([row(i).id for i in range(40)]), features(0, 40))
        assert journal.rows >= 40


WRITER = """
import sys
import numpy as np
from ncm_cli.store.journal import Journal, ImageFile
rng = np.random.default_rng(0)
with Journal.open(sys.argv[1], {"k": 1}) as journal:
    start = journal.rows
    print("open", flush=True)
    for i in range(start, 10**6):
        features = np.full((1, 300), i, np.float32)
        journal.append([ImageFile(str(i), "p", i, i, "")], features)
        if i % 50 == 0:
            print(i, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_finished_row(tmp_path: Path) -> None:
    """h5py/h5py#879, TE_Density#149."""
    output = tmp_path / "f.h5"
    rng = np.random.default_rng(1)
    before = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(output)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(float(rng.uniform(0, 0.2)))
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        with Journal.open(output, {"k": 1}) as journal:
            assert journal.rows >= max(before, int(said[-1]) + 1 if said else 0)
            before = journal.rows
            for i in rng.integers(0, before, 50 if before else 0).tolist():
                assert journal.lookup(str(i)) == ImageFile(str(i), "p", i, i, "")
            taken = journal.take([str(position) for position in range(before)])
            assert (taken == np.arange(before)[:, None]).all()
    assert before > 100


@pytest.mark.slow
def test_memory_does_not_hold_the_rows(tmp_path: Path) -> None:
    output = tmp_path / "f.h5"
    block = np.ones((500, 256), np.float32)
    tracemalloc.start()
    with Journal.open(output, KEY) as journal:
        for start in range(0, 20_000, 500):
            journal.append([row(i) for i in range(start, start + 500)], block)
        for start in range(0, 20_000, 20):
            assert journal.take([row(start).id]).shape == (1, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 20 MB of features in all.
    assert peak < 10e6
