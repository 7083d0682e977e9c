"""What the scripts share is the same text in each: none imports another, and a copy that drifts fails here."""

import ast
import difflib
import re
import sys
from collections import Counter

import pytest
from conftest import ROOT, SCRIPTS

# Names that have another text in each script: what each one has to check, after check_each; and MAE-All selects no
# patches, has no padding and pools by [cls] alone. Every other name, and every field of Args, has the same text in all.
DIFFERENT = {"check_args", "attended_patches"}
# How many lines only spirl_rainbow.py has, and how many only spirl_baselines.py: a changed line is one more in each.
LINES_APART = {
    "make_envs": (6, 8),  # DE-Rainbow sees grey frames of 84 x 84
    "main": (57, 47),  # what is pre-trained and seen, the cache of errors, what is marked, an agent to watch
}
SOURCES = {script: (ROOT / script).read_text() for script in SCRIPTS}


def definitions(body, lines, end=0):
    """{name: text} of what statements define, the text with the comments above it; of Args' classes their --fields,
    where it is type, default and help."""
    found = {}
    for node in body:
        text = "\n".join(lines[end : node.end_lineno])
        text = re.sub(r"\A(#.*\n|\n)*(# ---.*\n|\n)", "", text)  # what is above an empty line or a heading
        end = node.end_lineno
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            fields = definitions(node.body, lines, node.lineno)
            found |= {f"--{name}": text for name, text in fields.items()}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = text
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{alias.name} of {getattr(node, 'module', '')}"
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    found[name.id] = found.get(name.id, "") + text  # |= adds to what is there
    return found


def drift(sources):
    """Everything that is wrong with the scripts {file name: source}, a list of messages."""
    wrong, defined, texts = [], {}, {}
    for script, source in sources.items():
        tree = ast.parse(source)
        defined[script] = definitions(tree.body, source.splitlines())
        parts = [part for node in tree.body if "check_" not in getattr(node, "name", "") for part in ast.walk(node)]
        loads = [part for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)]
        used = {part.attr for part in loads if ast.unparse(part.value) == "args"}  # to check one is no use of it
        used |= set(re.findall(r"\w+", defined[script]["mae_sizes"]))
        for name, text in defined[script].items():
            if name.startswith("--") and name[2:] not in used:
                wrong.append(f"{script}: nothing reads {name}")
            apart = name in DIFFERENT or (script, name) == ("spirl_baselines.py", "make_envs")
            if not apart and texts.setdefault(name, text) != text:
                diff = difflib.unified_diff(texts[name].splitlines(), text.splitlines(), lineterm="", n=0)
                wrong.append("\n".join([f"{name} has drifted in {script}:", *diff]))

    two = "spirl_rainbow.py", "spirl_baselines.py"
    environments = [defined[script]["make_envs"] for script in two]
    loops = [sources[script].partition("    args = parse_args()\n")[2] for script in two]
    for name, pair in (("make_envs", environments), ("main", loops)):
        changes = list(difflib.unified_diff(*map(str.splitlines, pair), n=0, lineterm=""))[2:]  # without two headings
        count = Counter(line[0] for line in changes)
        if (count["-"], count["+"]) != LINES_APART[name]:
            wrong.append(f"{name}: lines that only one of the two has, not {LINES_APART[name]}: {count}")
    return wrong


def test_the_scripts_share_the_same_text():
    assert SCRIPTS.keys() == {path.name for path in ROOT.glob("*.py")}
    assert drift(SOURCES) == []


def test_requirements_are_exact_explained_and_used():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = [re.fullmatch(r"([\w-]+)==[\d.]+ +# .+", line)[1].replace("-", "_") for line in lines]
    imports = re.findall(r"^ *(?:import|from) (\w+)", "\n".join(SOURCES.values()), re.M)
    others = {"tensorboard", "pytest"}  # PyTorch's SummaryWriter needs the first
    assert set(packages) == set(imports) - sys.stdlib_module_names | others


@pytest.mark.parametrize(
    "script, before, after, message",
    [
        ("mae", "return x + out if self.residual else out", "return x + out", "Block has drifted"),
        ("mae", "\nHELD_OUT_FRAMES = 256", "\nHELD_OUT_FRAMES: int = 256", "HELD_OUT_FRAMES has drifted"),
        ("mae", "# Each purpose has", "# Every purpose has", "ACT has drifted"),
        ("mae", "import tyro\n", "import tyro as F\n", "F has drifted"),
        ("mae", "passes over those frames,", "passes,", "--mae_epochs has drifted"),
        ("mae", "    coverage: float", "    never: int = 1\n    coverage: float", "nothing reads --never"),
        ("baselines", "noop_max=30", "noop_max=10", "make_envs: lines"),
        ("baselines", "np.clip(reward[0], -1, 1)", "np.clip(reward[0], -2, 2)", "main: lines"),
    ],
)
def test_the_checker_sees_each_kind_of_drift(script, before, after, message):
    source = SOURCES[f"spirl_{script}.py"]
    assert source.count(before) == 1
    changed = SOURCES | {f"spirl_{script}.py": source.replace(before, after)}
    assert any(message in found for found in drift(changed))
