"""The README holds what it says: its snippets run, its commands parse, its names and files exist."""

import re
import shlex
import sys

import pytest
from conftest import ROOT, SCRIPTS, run

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_snippet_runs_as_it_stands(snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and not list(tmp_path.iterdir())  # it says what it made, and leaves nothing behind


def test_the_pictures_and_links_are_there():
    paths = [path for path in re.findall(r"\]\((.*?)\)", README) if not path.startswith("https://")]
    assert len(paths) > 3 and all((ROOT / path.partition("#")[0]).exists() for path in paths)


def test_the_first_layer_is_short_and_the_second_folded_away():
    before_the_first_command = README[: README.index("```bash")]
    first_layer, *sections = README.split("<details>")
    assert len(before_the_first_command.split()) <= 120 and len(first_layer.splitlines()) <= 90
    assert len(sections) == 10 and README.count("```python") == 3 and len(README.splitlines()) <= 260
    for section in sections:  # GitHub reads what follows as Markdown only after an empty line
        assert re.match(r"<summary><b>.+</b></summary>\n\n", section), section[:100]
        assert section.rstrip().endswith("</details>"), section[-100:]


def test_every_command_of_the_readme_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)  # where no run has the name of one in the README
    commands = re.findall(r"python (spirl_\w+\.py[^`\n]*)", README)
    assert len(commands) > 10
    for command in commands:
        script, *flags = shlex.split(command.replace("{}", "1"))  # xargs puts the seed there
        if "--resume" in flags:
            continue
        monkeypatch.setattr(sys, "argv", [script, *flags])
        SCRIPTS[script].check_args(SCRIPTS[script].parse_args())


def test_every_name_in_the_readmes_map_exists():
    section = README.partition("<summary><b>Where the paper is")[2].partition("</details>")[0]
    names = set(re.findall(r"`(\w+)`", section))
    assert len(names) > 20
    for name in names:
        assert any(hasattr(module, name) for module in SCRIPTS.values()), name


@pytest.mark.parametrize("script", [*ROOT.glob("tests/results/*.py"), *ROOT.glob("tests/benchmarks/*.py")])
def test_a_script_beside_the_tests_starts(tmp_path, script):
    done = run(tmp_path, "--help", script=script)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
