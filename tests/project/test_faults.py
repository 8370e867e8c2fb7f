"""Each test of a fault says what happens and what the user sees: the table of faults is made of its mark."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest


def test_each_fault_is_marked_once_and_says_what_is_seen() -> None:
    found = list(faults.faults())
    assert len({fault.what for fault in found}) == len(found) >= 150
    for fault in found:
        assert fault.what.strip(), fault
        assert fault.see.strip(), fault
        assert not {"|", "\n"} & set("".join(fault)), fault


@pytest.mark.parametrize("mark", ["fault", "fault()", "fault('x')", "fault('x', see='y', more='z')", "fault('x', 'y')"])
def test_a_mark_that_lacks_a_field_is_refused_with_its_test(tmp_path: Path, mark: str) -> None:
    (tmp_path / "test_x.py").write_text(f"@pytest.mark.{mark}\ndef test_y(): ...\n", encoding="utf-8")
    with pytest.raises(ValueError, match="test_x.py::test_y"):
        list(faults.faults(tmp_path))


def test_the_table_has_the_rows_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    faults.main("Wrong Clocks")
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 4
    assert rows
    assert all("wrong clocks" in row for row in rows)
