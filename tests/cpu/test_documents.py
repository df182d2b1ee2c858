"""What the documents say is so."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import engines
from scripts import models_page, options_page
from sgl_prefill import plan
from sgl_prefill.config import PrefillConfig, flag_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "sgl_prefill" / "OPTIONS.md").read_text()


def test_a_newcomer_reads_no_more_than_1000_words() -> None:
    """Everything deeper is in pages beside the code."""
    assert len(README.split()) <= 1000


def test_the_planners_arguments_are_what_it_takes() -> None:
    (arguments,) = re.findall(r"-m sgl_prefill\.plan (.*?)`", README)
    plan._parser().parse_args(arguments.split())


def test_the_table_of_families_is_what_was_measured() -> None:
    assert models_page.PAGE.read_text() == models_page.PART.page(), "run python -m scripts.models_page --write"


def test_the_options_page_is_generated() -> None:
    assert options_page.PAGE.read_text() == options_page.PART.page(), "run python -m scripts.options_page --write"
    assert all(
        f"`{field.name}`" in OPTIONS or f"`{flag_of(field.name)}" in OPTIONS
        for field in dataclasses.fields(PrefillConfig)
    )


def test_every_script_and_module_that_the_readme_runs_exists() -> None:
    """Copy and paste works: scripts are executable, modules are importable by name."""
    scripts = set(re.findall(r"scripts/[a-z_]+\.sh", README))
    assert {"scripts/demo.sh", "scripts/install.sh"} <= scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111
    for module in set(re.findall(r"-m (sgl_prefill[\w.]+)", README)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for place in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / place).exists(), place


def test_packages_are_installed_from_the_clone() -> None:
    """No index has this package's name."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("sgl_prefill/**/*.md"), *ROOT.glob("sgl_prefill/**/*.py")]
    assert len(pages) > 100
    for page in pages:
        assert not re.search(r"pip install ['\"]?sgl[-_]prefill", page.read_text()), page


def test_the_python_blocks_of_the_readme_compile() -> None:
    """No placeholder that is no Python."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_first_result_is_on_the_first_screen() -> None:
    """The two commands and what they print stand within 30 lines."""
    top = "\n".join(README.splitlines()[:30])
    assert "scripts/demo.sh" in top
    assert "scripts/install.sh" in top
    assert "labelled right: 24 of 24" in top


def test_the_structure_lists_every_folder_and_every_module_says_what_it_does() -> None:
    text = (ROOT / "sgl_prefill" / "STRUCTURE.md").read_text()
    for file in (ROOT / "sgl_prefill").rglob("*.py"):
        folder = file.relative_to(ROOT / "sgl_prefill").parts[0]
        assert folder.endswith(".py") or f"`{folder}/`" in text, folder
        assert file.name == "__init__.py" or ast.get_docstring(ast.parse(file.read_text())), file


# What a workload says of itself, or of the machine.
OF_THE_WORKLOAD = {"max-input-length", "memory-budget-gb"}
OTHER_SETTING = re.compile(
    r"--(set|" + "|".join(field.name.replace("_", "-") for field in dataclasses.fields(PrefillConfig)) + r")\b"
)


def test_ours_is_what_a_user_gets() -> None:
    """No flag at all, and `--paper` alone: neither the harness, nor a page, nor a result calls another setting so."""
    assert (engines.OURS.flags, engines.PAPER.flags) == ((), ("--paper",))
    for file in ROOT.glob("benchmarks/**/*.py"):
        for call in re.findall(r"engines?\.ours\(\"([^\"]*)\"", file.read_text()):
            assert call not in ("ours", "ours, --paper"), file
    for page in [ROOT / "README.md", *ROOT.glob("benchmarks/**/*.md")]:
        for sentence in re.split(r"(?<=[.:;])\s", page.read_text()):
            if re.search(r"\bours\b(?!,)", sentence, re.I):
                others = set(OTHER_SETTING.findall(sentence)) - {"paper"}
                assert not others, f"{page}: {sentence}"
    for result in ROOT.glob("benchmarks/*/result.json"):
        commands = json.loads(result.read_text())["conditions"].get("commands", {})
        for name, flags in (("ours", set()), ("ours, --paper", {"paper"})):
            if name in commands:
                assert set(OTHER_SETTING.findall(commands[name])) - OF_THE_WORKLOAD == flags, result


def test_the_changelog_starts_with_the_version_of_the_package() -> None:
    """Changelog and pyproject agree."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.group(1) == importlib.metadata.version("sgl-prefill")


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in ROOT.glob("benchmarks/*/run.py")), ids=lambda p: p.name
)
def test_every_benchmark_has_a_readme_and_a_full_result(folder: Path) -> None:
    """The committed JSON names its command and holds targets with values, or rows that explain those of others."""
    text = (folder / "README.md").read_text()
    is_measured = (folder / "result.json").exists()
    assert is_measured != ("Not measured yet." in text), "a benchmark without a result says so"
    if not is_measured:
        return
    result = json.loads((folder / "result.json").read_text())
    assert result["conditions"]["command"] == f"python benchmarks/{folder.name}/run.py"
    assert result["conditions"]["commit"]
    assert result["targets"] or (folder.name == "step_profile" and result["rows"])
    for target in result["targets"]:
        assert set(target) == {"name", "value", "target", "met", "direction"}


def test_the_speeds_of_the_readme_are_in_the_results() -> None:
    """All at once, medians: ours, the best policy of SGLang with its own attention and with our kernels, vLLM."""
    section = README[README.index("| workload |") :].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()[2:]]
    assert rows
    for _, per_s, stock_per_s, kernel_per_s, vllm_per_s, where in rows:
        benchmark, part = re.findall(r"`(\w+)`", where)
        result = json.loads((ROOT / "benchmarks" / benchmark / "result.json").read_text())["parts"][part]
        at_once = {row["engine"]: row for row in result["medians"] if row["offered_per_s"] is None}

        def best(ending: str, at_once: dict[str, dict[str, float]] = at_once) -> str:
            return f"{max(row['requests_per_s'] for name, row in at_once.items() if name.endswith(ending)):.1f}"

        assert f"{at_once['ours']['requests_per_s']:.1f}" == per_s
        assert (best("torch_native"), best("new kernel"), best("vLLM 0.32")) == (stock_per_s, kernel_per_s, vllm_per_s)


def test_nothing_of_one_machine_is_tracked() -> None:
    """No absolute path of a home or work folder, no index address, no file over 1 MiB."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        path = ROOT / name
        assert path.stat().st_size < 1 << 20, name
        text = path.read_text(errors="replace")
        assert not re.search(r"(^|[\s\"'=])/(root|home|work)/\w", text), name
        assert "--index" + "-url" not in text, name
