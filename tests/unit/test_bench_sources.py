"""`outrider bench sources` without a model: its options, its tables, and the document that holds them."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deployments.bench.sources_report import (
    BEGIN,
    END,
    HEADER,
    SOURCES,
    SourcesOptions,
    check_document,
    check_sources,
    markdown,
    print_sources,
    write_document,
)
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError


def row(source: str, temperature: float, **changes: Any) -> dict[str, Any]:
    return {
        "source": source,
        "temperature": temperature,
        "kind": "code",
        "alpha": 0.875,
        "num_tested": 40,
        "c": 0.5,
        "accepted_length": 3.25,
        "expected_speedup": 1.4,
        "speedup": (1.1, 1.2, 1.3),
        "speedup_by_load": (1.5, 1.5, 1.5),
        **changes,
    }


def result(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "dtype": "float32",
        "machine": "2 cores",
        "date": "2026-01-02",
        "rule": "coupled",
        "depth": 4,
        "num_tokens": 32,
        "rows": list(rows),
        "command": "outrider bench sources",
        "refused": {},
        "is_interrupted": False,
        **changes,
    }


# --- options ----------------------------------------------------------------------------------------------------------------


def test_sources_that_need_a_model_are_measured_where_it_is_configured() -> None:
    """Bug guarded: a run that ends because no draft model is configured, or leaves the configured one out."""
    assert SourcesOptions().chosen(OutriderConfig()) == [name for name in SOURCES if name not in ("model", "heads")]
    named = parse_config({"draft": {"source": "model", "model": "small"}})
    assert set(SOURCES) - set(SourcesOptions().chosen(named)) == {"heads"}
    assert SourcesOptions(sources="suffix, self-int8,suffix").chosen(named) == ["suffix", "self-int8"]
    assert SourcesOptions(sources="model").chosen(named) == ["model"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (SourcesOptions(sources="self-int8,trie"), "--sources: unknown source 'trie'; a list of self-int8"),
        (SourcesOptions(sources="heads"), "set draft.source to heads"),
        (SourcesOptions(temperatures="0,hot"), "--temperatures must be numbers from 0 to 2, such as 0,1; got '0,hot'"),
        (SourcesOptions(temperatures="3"), "--temperatures must be"),
        (SourcesOptions(temperatures=""), "--temperatures must be"),
        (SourcesOptions(tokens=2), "--tokens must be at least 8, got 2"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: SourcesOptions, told: str) -> None:
    """Bug guarded: minutes of measuring something else than what was asked."""
    with pytest.raises(ConfigError, match=told):
        options.chosen(OutriderConfig()), options.values(), options.num_tokens()


def test_what_was_not_given_follows_from_quick() -> None:
    """Bug guarded: an option that is accepted and ignored."""
    assert (SourcesOptions().num_tokens(), SourcesOptions(quick=True).num_tokens()) == (128, 32)
    assert SourcesOptions(tokens=64, quick=True).num_tokens() == 64
    assert SourcesOptions().values() == [0, 1]
    assert SourcesOptions(temperatures="0.7,0.7").values() == [0.7]


def test_the_command_can_be_typed_again() -> None:
    """Bug guarded: a document whose command measures something else, or that tells the folders of who made it."""
    assert SourcesOptions(markdown=Path("/home/me/sources.md")).command() == "outrider bench sources"
    options = SourcesOptions(
        config=Path("/home/me/outrider.yaml"),
        settings=["target.name=my model"],
        sources="ngram",
        temperatures="0.5",
        tokens=16,
        quick=True,
    )
    assert options.command() == (
        "outrider bench sources --config outrider.yaml --set 'target.name=my model' --sources ngram --temperatures 0.5 "
        "--tokens 16 --quick"
    )


@pytest.mark.parametrize(
    ("tree", "told"),
    [({"speculation": {"max_depth": 0}}, "max_depth is 0"), ({"target": {"model": "emulated:free"}}, "is emulated")],
)
def test_configurations_without_drafts_are_refused(tree: dict[str, Any], told: str) -> None:
    """Bug guarded: a table of sources that were switched off."""
    check_sources(OutriderConfig())
    with pytest.raises(ConfigError, match=told):
        check_sources(parse_config({**tree, "draft": {"source": "none"}}))


# --- tables -----------------------------------------------------------------------------------------------------------------


def test_tables_by_temperature() -> None:
    """Bug guarded: rows of one temperature under the heading of another, cells in another order than their headings, quartiles
    of a single prompt, a source that was refused or a run that was cut off without a word."""
    rows = (row("ngram", 0.0, alpha=None, num_tested=0, c=None), row("self-int8", 1.0))
    text = markdown(result(*rows, refused={"self-fp8": "needs a GPU"}))
    greedy, sampled = text.split("Temperature 1 (`coupled`):")
    assert "Temperature 0 (`greedy`):" in greedy
    heading = f"| {' | '.join(HEADER)} |\n| {' | '.join(['---'] * len(HEADER))} |\n"
    assert f"{heading}| ngram | - | code | no drafts | 3.25 | 1.40 | 1.20 (1.10–1.30) | 1.50 |" in greedy
    assert f"{heading}| self-int8 | 0.50 | code | 88% (40) | 3.25 | 1.40 | 1.20 (1.10–1.30) | 1.50 |" in sampled
    assert "Not measured: `self-fp8` (needs a GPU)." in text
    assert "only α and tokens per forward are to be trusted" in text
    assert "interrupted" not in text
    assert "interrupted: what is missing" in markdown(result(*rows, is_interrupted=True))
    assert text.startswith("`outrider bench sources` on 2026-01-02: tiny in float32, 2 cores; one request")


def test_terminals_see_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a partial run that looks like a whole one; a reason with brackets that is swallowed as markup."""
    told = result(row("self-int8", 0.0), refused={"self-fp8": "no [fp8]"}, is_interrupted=True)
    print_sources(told, Console(width=200))
    shown = capsys.readouterr().out
    assert "88% (40)" in shown
    assert "self-fp8 is left out: no [fp8]" in shown
    assert "interrupted" in shown


# --- document ---------------------------------------------------------------------------------------------------------------


def test_only_the_generated_part_of_a_document_is_replaced(tmp_path: Path) -> None:
    """Bug guarded: what people wrote around the tables is lost, or tables pile up."""
    path = tmp_path / "sources.md"
    path.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nWhen to use it.\n", encoding="utf-8")
    for _ in range(2):
        write_document(path, result(row("ngram", 0.0)))
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# Title\n\n{BEGIN}\n`outrider bench sources`")
        assert text.endswith(f"{END}\n\nWhen to use it.\n")
        assert "old" not in text
        assert text.count("| ngram |") == 1
    check_document(path)


def test_a_document_that_is_not_there_is_made(tmp_path: Path) -> None:
    """Bug guarded: a first run that cannot write, or a second one that cannot write into what the first one made."""
    path = tmp_path / "new.md"
    check_document(path)
    for _ in range(2):
        write_document(path, result(row("ngram", 0.0)))
    assert path.read_text(encoding="utf-8").count(BEGIN) == 1


@pytest.mark.parametrize("text", ["# Title\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n"])
def test_documents_without_a_place_are_told_before_anything_is_measured(text: str, tmp_path: Path) -> None:
    """Bug guarded: ten minutes of measuring that end in an error about a file, or overwrite it."""
    path = tmp_path / "sources.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="has no lines"):
        check_document(path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_document(tmp_path / "nowhere" / "sources.md")
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        check_document(tmp_path / "bytes.md")
