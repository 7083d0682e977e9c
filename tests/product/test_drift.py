"""What the scripts share is the same text in each: none imports another, and a copy that drifts fails here."""

import ast
import difflib
import re
import sys

import pytest
from conftest import ROOT, SCRIPTS

# Names that two scripts define with another text in each. Every other name has the same text in all.
DIFFERENT = {"RunArgs", "PretrainingArgs", "SelectionArgs", "AgentArgs", "TrainingArgs", "Args"}  # what each one reads
DIFFERENT |= {"check_args"}  # what each one has to check, after check_each
DIFFERENT |= {"attended_patches"}  # MAE-All selects none, has no padding and pools by [cls] alone
# How many lines only spirl_rainbow.py has, and how many only spirl_baselines.py: a changed line is one more in each.
LINES_APART = {
    "make_envs": (6, 8),  # DE-Rainbow sees grey frames of 84 x 84
    "main": (25, 14),  # from the networks on: the cache of errors, what is marked, an agent to watch
}


def definitions(body, lines):
    """The names that statements define, and the source of each, with the comments above it."""
    found = {}
    for node in body:
        start = min(decorator.lineno for decorator in [*getattr(node, "decorator_list", []), node])
        while re.match(r" *# [^-]", lines[start - 2]):
            start -= 1
        text = "\n".join(lines[start - 1 : node.end_lineno])
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"import {alias.name} of {getattr(node, 'module', '')}"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = text
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            stored = [name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
            for name in stored:
                found[name.id] = found.get(name.id, "") + text  # |= adds to what is there
    return found


def fields(tree, lines):
    """The fields of Args: each one's name, type, default and help, which is its comment, as they are written."""
    bases = [node.body for node in tree.body if getattr(node, "name", "").endswith("Args")]
    return {name: text for body in bases for name, text in definitions(body, lines).items()}


def names_read(tree):
    """Fields that are read as args.NAME, or that mae_sizes lists; to check one is no use of it."""
    used = set()
    for node in tree.body:
        if not getattr(node, "name", "").startswith("check_"):
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
                    used.add(ast.unparse(part).removeprefix("args."))
                if isinstance(part, ast.Constant) and getattr(node, "name", "") == "mae_sizes":
                    used.update(str(part.value).split())
    return used


def imports(tree):
    """The packages that a script imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in whole + parts} - set(sys.stdlib_module_names)


def lines_apart(left, right):
    """How many lines only the left and only the right text has."""
    changes = [line[0] for line in difflib.unified_diff(left.splitlines(), right.splitlines(), n=0, lineterm="")]
    return changes[2:].count("-"), changes[2:].count("+")  # the first two are headings


REQUIREMENTS = (ROOT / "requirements.txt").read_text().splitlines()
PACKAGES = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in REQUIREMENTS}


def drift(sources):
    """Everything that is wrong with the scripts {file name: source}, a list of messages."""
    wrong, defined, texts, field_texts = [], {}, {}, {}
    for script, source in sources.items():
        tree, lines = ast.parse(source), source.splitlines()
        defined[script] = definitions(tree.body, lines)
        for name, text in defined[script].items():
            apart = name in DIFFERENT or (script, name) == ("spirl_baselines.py", "make_envs")
            if not apart and texts.setdefault(name, text) != text:
                diff = difflib.unified_diff(texts[name].splitlines(), text.splitlines(), lineterm="", n=0)
                wrong.append("\n".join([f"{name} has drifted in {script}:", *diff]))
        used = names_read(tree)
        for name, text in fields(tree, lines).items():
            if field_texts.setdefault(name, text) != text:
                wrong.append(f"--{name} differs in {script}: {field_texts[name]} and {text}")
            if name not in used:
                wrong.append(f"{script}: nothing reads Args.{name}")
        for package in imports(tree) - PACKAGES:
            wrong.append(f"{script} imports {package}, which requirements.txt does not have")

    two = "spirl_rainbow.py", "spirl_baselines.py"
    environments = [defined[script]["make_envs"] for script in two]
    loops = [sources[script].partition("    online = RainbowNetwork(")[2] for script in two]
    for name, pair in (("make_envs", environments), ("main", loops)):
        if lines_apart(*pair) != LINES_APART[name]:
            wrong.append(f"{name}: lines that only one of the two has: {lines_apart(*pair)}, not {LINES_APART[name]}")
    return wrong


SOURCES = {script: (ROOT / script).read_text() for script in SCRIPTS}


def test_the_scripts_share_the_same_text():
    assert SCRIPTS.keys() == {path.name for path in ROOT.glob("*.py")}
    assert drift(SOURCES) == []


def test_requirements_are_exact_explained_and_used():
    assert all(re.fullmatch(r"[\w-]+==[\d.]+ +# .+", line) for line in REQUIREMENTS)
    used = set().union(*(imports(ast.parse(source)) for source in SOURCES.values()))
    assert PACKAGES - used == {"tensorboard", "pytest"}  # PyTorch's SummaryWriter needs the first


@pytest.mark.parametrize(
    "script, before, after, message",
    [
        ("mae", "return x + out if self.residual else out", "return x + out", "Block has drifted"),
        ("mae", "\nHELD_OUT_FRAMES = 256", "\nHELD_OUT_FRAMES: int = 256", "HELD_OUT_FRAMES has drifted"),
        ("mae", "# Each purpose has", "# Every purpose has", "ACT has drifted"),
        ("mae", "import tyro\n", "import tyro as F\n", "F has drifted"),
        ("mae", "noop_max=30", "noop_max=10", "make_envs has drifted"),
        ("mae", "lorenz_slope: float = 0.5", "lorenz_slope: float = 1.0", "--lorenz_slope differs"),
        ("mae", "passes over those frames,", "passes,", "--mae_epochs differs"),
        ("mae", "    coverage: float", "    never: int = 1\n    coverage: float", "nothing reads Args.never"),
        ("mae", "import json", "import json\nimport scipy", "imports scipy"),
        ("baselines", "noop_max=30", "noop_max=10", "make_envs: lines"),
        ("baselines", "np.clip(reward[0], -1, 1)", "np.clip(reward[0], -2, 2)", "main: lines"),
        ("rainbow", "                run.actions = []\n", "", "main: lines"),
    ],
)
def test_the_checker_sees_each_kind_of_drift(script, before, after, message):
    source = SOURCES[f"spirl_{script}.py"]
    assert source.count(before) == 1
    changed = SOURCES | {f"spirl_{script}.py": source.replace(before, after)}
    assert any(message in found for found in drift(changed))
