"""The documentation is true: tables equal the results, examples run, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import samebits
from samebits.integrations import MINIMUM

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = """
import shlex, sys
from samebits.cli.run import run
for line in sys.argv[1:]:
    code = run(shlex.split(line)[1:])
    if code:
        sys.exit(f"{line}: exit code {code}")
"""
ELSEWHERE = {"vllm.md"}  # whose Python runs in tests/serving
LINKED = [*PAGES, ROOT / "FORMAT.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*/README.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
MEASURING = re.compile(r"python benchmarks/(\w+\.py)([^`\n#]*)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """An empty folder in which the repository's examples and test vectors are found."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}\n{done.stderr}"


def test_tables_equal_the_results() -> None:
    script = ROOT / "benchmarks" / "tables.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0, "run `make tables`"


def test_the_reference_equals_the_docstrings() -> None:
    script = ROOT / "docs" / "reference.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0, "run `make tables`"


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    titles = set(re.findall(r"^### samebits\.(\w+)$", text, re.MULTILINE))
    assert titles == {*samebits.__all__} - {"__version__"}
    assert not re.findall(r"^- `[^`]*`: ?$", text, re.MULTILINE)  # nothing is said of it


@pytest.mark.parametrize(
    "page", [page for page in pages_with("python") if page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_python_examples_run(page: Path, checkout: Path) -> None:
    """The blocks of a page in one process, one after the other, as a reader would paste them."""
    run([sys.executable, "-c", "\n".join(blocks(page, "python"))], checkout)


@pytest.mark.parametrize("name", ["any_module.py", "lora.py", "pipeline.py"])
def test_examples_are_shown(name: str) -> None:
    """Those of the README that are files too, and so run with it."""
    assert (ROOT / "examples" / name).read_text(encoding="utf-8") in blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", pages_with("console"), ids=lambda page: page.name)
def test_commands_run(page: Path, checkout: Path) -> None:
    """In one process, for each would import torch anew."""
    lines = [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    assert all(line.startswith("samebits ") for line in lines)
    run([sys.executable, "-c", COMMANDS, *lines], checkout)


def test_versions_are_the_same_everywhere() -> None:
    """In the README's table, in what pip is told, and in what is compared at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == samebits.__version__
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    told = re.findall(r"^(\w+)>=([\d.]+)", "\n".join([f"python{project['requires-python']}", *asked]), re.MULTILINE)
    least = {name: found for name, found in told if name in ("python", "torch", *MINIMUM)}
    assert not [name for name, found in MINIMUM.items() if least.get(name, found) != found]
    said = (ROOT / "README.md").read_text(encoding="utf-8").lower().replace("sentence-", "sentence_")
    assert not [name for name, found in {**least, **MINIMUM}.items() if f"{name} from {found} on" not in said]


def sections(page: Path) -> set[str]:
    """Names of a page's sections, as GitHub makes them of headings, and of marks in the text."""
    text = page.read_text(encoding="utf-8")
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in HEADING.findall(text)]
    made = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in headings}
    return made | {*re.findall(r'id="([^"]+)"', text)}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for name, section in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not section or section in sections(target), f"{name}#{section}"


def test_every_result_has_its_command() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    names = {path.stem.removesuffix("-h100") for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert not [name for name in names if not re.search(rf"^\| ([^|]*\W)?{name}\b[^|]* \| `python", text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_have_the_options_that_pages_give(page: Path) -> None:
    for script, arguments in MEASURING.findall(page.read_text(encoding="utf-8")):
        source = (ROOT / "benchmarks" / script).read_text(encoding="utf-8")
        assert not [option for option in re.findall(r"--[\w-]+", arguments) if option not in source], script
