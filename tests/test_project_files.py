"""The files at the root say the same thing, and nothing in them belongs to one machine."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def requirement_name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", text)[0]).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {requirement_name(line): line.split("==")[1] for line in lines}


def test_every_requirement_is_pinned_exactly():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]
    missing = {requirement_name(one) for one in wanted} - set(pins())
    assert not missing
    assert pins()["torch"] == "2.13.0"  # no local part: it fits the CPU and the CUDA builds


def test_training_needs_five_packages_only():
    names = {requirement_name(one) for one in PROJECT["dependencies"]}
    # filelock comes with torch; it is named because we import it too
    assert names - {"filelock"} == {"torch", "numpy", "pandas", "pyarrow", "safetensors"}


def test_environment_yml_adds_nothing_to_the_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, from_pip = environment["dependencies"]
    assert [one.split("=")[0] for one in conda] == ["python", "pip"]
    constraint, package = from_pip["pip"]
    assert constraint == "-c constraints.txt"
    extras = re.fullmatch(r"-e \.\[(.*)\]", package)[1].split(",")
    assert set(extras) == set(PROJECT["optional-dependencies"])
    minimum = re.search(r"\d+\.\d+", PROJECT["requires-python"])[0]
    assert f"python={minimum}" in conda


def test_make_installs_what_environment_yml_does():
    package = re.search(r"-e '?(\.\[[^']*\])", (ROOT / "Makefile").read_text())[1]
    assert package in (ROOT / "environment.yml").read_text()


def test_jupyter_book_stays_below_2():
    """S4.1: an unpinned install brings another program of the same name."""
    assert "jupyter-book>=1.0.4,<2" in PROJECT["optional-dependencies"]["book"]
    assert pins()["jupyter-book"].split(".")[0] == "1"
    assert version("jupyter-book").split(".")[0] == "1"
    for path in tracked_files():
        if path.suffix in (".toml", ".yml", ".txt", ".md") or path.name in ("Makefile", "run"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if re.search(r"\b(pip|uv|conda|mamba|pipx) .*install", line):
                    assert "jupyter-book" not in line, f"{path}: {line}"


def test_ci_runs_the_readme_s_test_command():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-1].removeprefix("exec ") == "make test"
    assert "make test" in (ROOT / "README.md").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert ".ci/run" in steps
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_no_tracked_file_names_a_machine_or_a_package_registry():
    hosts = "|".join(
        ("pypi" + r"\.org", "pythonhosted" + r"\.org", "anaconda" + r"\.org", "npmjs" + r"\.org",
         "download" + r"\.pytorch\.org")
    )  # fmt: skip
    homes = r"(?<![\w.:/\"'<-])/(?:home|root|Users|work|tmp)/"
    for path in tracked_files():
        if "mathjax" in path.parts or path.suffix in (".parquet", ".safetensors"):
            continue
        found = re.search(f"{hosts}|{homes}", path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_the_readme_s_python_runs(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    assert float(re.search(r"tensor\((.*?)[,)]", capsys.readouterr().out)[1]) < 1e-4


def test_importing_the_package_loads_no_torch():
    """The papermill hook imports the package at each start of papermill."""
    code = "import sys, papermill; print('torch' in sys.modules, 'leancluster_core' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False True"
