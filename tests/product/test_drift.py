"""What the scripts share is the same text in each: none imports another, and a copy that drifts fails here."""

import ast
import difflib
import re
import sys

import pytest
from conftest import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))

# Names defined in more than one script, with the same source in each.
SHARED = {
    "fail", "parse_args", "checksum", "run_folder", "open_run", "stop", "MAY_BE_0", "SHARES", "check_each", "pick_device", "COLLECT", "PRETRAIN", "PLAY", "ACT",
    "LEARN", "EVALUATE", "game_seeds", "sincos_positions", "Block", "normalize_patches", "initialize", "MaskedAutoencoder",
    "PAPER_MAE_FRAMES", "HELD_OUT_FRAMES", "collect_random_frames", "warmup_cosine", "pretrain_mae",
    "surrounding_patches", "rebuild_from_surroundings", "reconstruction_error_map", "ErrorMapCache",
    "select_salient_patches", "count_salient_patches", "encode_patches", "PAPER_MAX_RATIO", "ratio_to_patches",
    "ideal_max_ratio", "Replay", "NoisyLinear", "SalientPatchTransformer", "RainbowNetwork", "project_distribution",
    "c51_loss", "learn", "evaluate", "attended_patches", "mark_patches", "draw_policy_attention", "save_video",
    "atomic", "read_checkpoint", "mae_sizes", "save_mae", "load_mae", "keep_freed_memory",
}

# Names that differ on purpose, and why.
DIFFERENT = {
    "Args": "each script has the arguments that it reads; a field in two scripts is compared on its own, below",
    "RunArgs": "the same", "PretrainingArgs": "the same", "SelectionArgs": "the same", "AgentArgs": "the same",
    "TrainingArgs": "the same",
    "check_args": "each script checks what it has, after check_each",
    "make_envs": "DE-Rainbow sees 84x84 grey frames; the lines that differ are listed below, and no other may",
}

# What spirl_rainbow.py and spirl_baselines.py do not share from the networks to the report, and why: every other line
# is equal.
# The replay holds the embeddings of the selected patches, whose number K and error map are SPIRL's alone.
ONLY_SPIRL = {
    'if args.agent_checkpoint is not None:  # all steps are done: what is left is to evaluate',
    'online.load_state_dict(trained["model"])',
    'run.saved_step = args.total_timesteps',
    'error_map.errors.update(checkpoint["errors"])',
    '"errors": error_map.errors,',
    "# Evaluate, with a copy of the known errors: an error's last digits depend on what else was computed with it,",
    "# and training should not change with the number of evaluations.",
    "eval_error_map = ErrorMapCache(mae)",
    'eval_error_map.errors.update(error_map.errors)',
    'eval_preprocess = partial(embed_salient_patches, mae, eval_error_map, max_patches, lorenz_slope)',
    'scores, recording = evaluate(args, online, eval_preprocess)',
    'agent = {"model": online.state_dict(), "args": vars(args), "step": eval_step, "max_patches": max_patches}',
    'marked = []',
    'for frame, state in recording:',
    'errors = eval_error_map(torch.from_numpy(frame[None]))',
    'patch_ids, _ = select_salient_patches(errors, max_patches, lorenz_slope)',
    'marked.append((frame, *attended_patches(trunk, state, patch_ids)))',
    'draw_policy_attention(marked, mae.side, run_dir / "figures/policy_attention.png")',
    'save_video(marked, mae.side, run_dir / "videos/policy.gif")',
    'writer.add_scalar("charts/K", replay.counts[replay.slot], step)',
}
# The replay holds pixels, or the embeddings of all patches; figures mark patches only where there are some.
ONLY_BASELINES = {
    '# Evaluate.',
    'scores, recording = evaluate(args, online, preprocess)',
    'agent = {"model": online.state_dict(), "args": vars(args), "step": eval_step}',
    'if args.method == "mae-all":',
    'side = mae.side',
    'patch_ids = torch.arange(mae.num_patches, device=device)[None]',
    'marked = [(frame, *attended_patches(trunk, state, patch_ids)) for frame, state in recording]',
    'draw_policy_attention(marked, side, run_dir / "figures/policy_attention.png")',
    'elif args.capture_video:  # grey as RGB; no patches are marked, so the whole frame counts as one',
    'side = 1',
    'marked = [(frame[..., None].repeat(3, 2), [], []) for frame, _ in recording]',
    'save_video(marked, side, run_dir / "videos/policy.gif")',
}
# The same for make_envs: the lines of the scripts that only ever see RGB, and those of spirl_baselines.py.
ONLY_RGB = {
    '"""`num_envs` Atari games (Table 9) as one vector environment: uint8 RGB observations (num_envs, 1, H, W, 3), raw',
    'rewards. Seeds go to `reset`. `terminations` and `truncations` are of games; a lost life shows in `info["lives"]`',
    'alone. The step after a game\'s end ignores its action and resets the game, unless `reset` is called before."""',
    'img_height=args.image_size,',
    'img_width=args.image_size,',
    'grayscale=False,',
}
ONLY_GREY = {
    '"""`num_envs` Atari games (Table 9) as one vector environment: uint8 observations, RGB (num_envs, 1, H, W, 3) for',
    'mae-all, grey (num_envs, 1, 84, 84) for DE-Rainbow, as van Hasselt et al. (Table 9: 96 x 96 RGB); raw rewards. Seeds',
    'go to `reset`. `terminations` and `truncations` are of games; a lost life shows in `info["lives"]` alone. The step',
    'after a game\'s end ignores its action and resets the game, unless `reset` is called before."""',
    'size = args.image_size if args.method == "mae-all" else 84',
    'img_height=size,',
    'img_width=size,',
    'grayscale=args.method != "mae-all",',
}

# What a script may import beside the standard library: import name -> name in requirements.txt.
PACKAGES = {"torch": "torch", "gymnasium": "gymnasium", "ale_py": "ale-py", "numpy": "numpy", "tyro": "tyro",
            "matplotlib": "matplotlib", "tqdm": "tqdm"}
# SummaryWriter, of torch.utils.tensorboard, needs a package that is never imported by name.
REQUIRED_UNIMPORTED = {"tensorboard", "pytest"}


def definitions(source):
    """Top-level names of a script and their source, with the comments above and inside; without its `__main__`."""
    lines, found = source.splitlines(), {}

    def walk(body):
        for node in body:
            names = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for target in targets for name in ast.walk(target)
                         if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
            elif isinstance(node, ast.If | ast.Try | ast.With) and "__main__" not in ast.unparse(node).splitlines()[0]:
                walk([child for field in ("body", "orelse", "finalbody") for child in getattr(node, field, [])])
            start = min([node.lineno] + [decorator.lineno for decorator in getattr(node, "decorator_list", [])])
            while lines[start - 2].startswith("# ") and not lines[start - 2].startswith("# ---"):
                start -= 1
            for name in names:
                found[name] = "\n".join(lines[start - 1 : node.end_lineno])

    walk(ast.parse(source).body)
    return found


def fields(source):
    """Fields of Args, that is of its base classes: name -> (type, default, help: the comment beside it, or the lines
    above it)."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines, found = source.splitlines(), {}
    for node in [node for base in classes["Args"].bases for node in classes[base.id].body]:
        if isinstance(node, ast.AnnAssign):
            help, above = lines[node.lineno - 1].partition("  # ")[2], node.lineno - 2
            while not help or lines[above].startswith("    # ") and lines[above + 1].startswith("    # "):
                help, above = lines[above].strip(" #") + " " + help, above - 1
            found[node.target.id] = (ast.unparse(node.annotation), ast.unparse(node.value), help)
    return found


def drift(sources):
    """Everything that is wrong with the scripts {file name: source}, a list of messages."""
    wrong, bound, defined = [], {}, {name: definitions(source) for name, source in sources.items()}
    for name in sorted({name for names in defined.values() for name in names}):
        copies = {script: names[name] for script, names in defined.items() if name in names}
        if len(copies) > 1 and name not in SHARED and name not in DIFFERENT:
            wrong.append(f"{name} is in {', '.join(copies)} but neither in SHARED nor in DIFFERENT")
        if name in SHARED:
            (first, text), *others = copies.items()
            for script, other in others:
                if other != text:
                    lines = difflib.unified_diff(text.splitlines(), other.splitlines(), first, script, lineterm="")
                    wrong.append(f"{name} has drifted:\n" + "\n".join(lines))
    seen = {}
    for script, source in sources.items():
        for name, field in fields(source).items():
            if seen.setdefault(name, (script, field))[1] != field:
                wrong.append(f"--{name} differs: {seen[name]} and {(script, field)}")
        tree = ast.parse(source)
        checks = {node for check in tree.body if getattr(check, "name", "").startswith("check_")
                  for node in ast.walk(check)}  # to check an argument is not to use it
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name) and node.value.id == "args"
                and isinstance(node.ctx, ast.Load) and node not in checks}
        read |= {name for function in tree.body if getattr(function, "name", "") == "mae_sizes"  # it names them
                 for node in ast.walk(function) if isinstance(node, ast.Constant) for name in str(node.value).split()}
        wrong += [f"{script}: nothing reads Args.{name}" for name in fields(source) if name not in read]
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            for alias in getattr(node, "names", []) if modules else []:
                origin = f"{getattr(node, 'module', '')}:{alias.name}"
                if bound.setdefault(alias.asname or alias.name, origin) != origin:
                    wrong.append(f"{script}: {alias.asname or alias.name} is not what it is in another script")
            for module in {module.split(".")[0] for module in modules}:
                by_name = module == "importlib" and getattr(node, "module", "") != "importlib.metadata"
                if module.startswith("spirl") or not module or by_name:
                    wrong.append(f"{script} imports a sibling: {module}")
                elif module not in sys.stdlib_module_names and module not in PACKAGES:
                    wrong.append(f"{script} imports {module}, which requirements.txt does not have")
    return wrong


def lines_apart(left, right):
    """The lines, without indentation, that only one of two texts has: a pair of sets."""
    lines = list(difflib.unified_diff(left.splitlines(), right.splitlines(), n=0, lineterm=""))[2:]  # no file names
    return tuple({line[1:].strip() for line in lines if line.startswith(sign)} - {""} for sign in "-+")


def training_loop(source):
    """The text of a script from the two networks to the end of training."""
    main = source[source.index('if __name__ == "__main__":') :]
    return main[main.index("    online = RainbowNetwork(") : main.index("    # The report.")]


@pytest.fixture(scope="module")
def sources():
    return {script: (ROOT / script).read_text() for script in SCRIPTS}


def test_the_scripts_share_the_same_text(sources):
    assert drift(sources) == []


def test_every_shared_name_is_shared(sources):
    defined = [definitions(source) for source in sources.values()]
    for name in SHARED | DIFFERENT.keys():
        assert sum(name in names for names in defined) > 1, name


def test_the_training_loops_are_the_same(sources):
    spirl, baselines = (training_loop(sources[script]) for script in ("spirl_rainbow.py", "spirl_baselines.py"))
    assert len(spirl.splitlines()) > 90
    assert lines_apart(spirl, baselines) == (ONLY_SPIRL, ONLY_BASELINES)
    changed = baselines.replace("np.clip(reward[0], -1, 1)", "np.clip(reward[0], -2, 2)")
    assert lines_apart(spirl, changed) != (ONLY_SPIRL, ONLY_BASELINES)  # what this test is for


def test_the_environments_differ_in_the_picture_alone(sources):
    scripts = ("spirl_rainbow.py", "spirl_mae.py", "spirl_baselines.py")
    rgb, same, grey = (definitions(sources[script])["make_envs"] for script in scripts)
    assert rgb == same
    assert lines_apart(rgb, grey) == (ONLY_RGB, ONLY_GREY)


def test_requirements_are_exact_and_used(sources):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {}
    for line in lines:
        requirement, _, comment = line.partition("#")
        name, _, number = requirement.strip().partition("==")
        assert number and comment.strip(), f"{line} is not an exact pin with a comment on what it is for"
        pinned[name] = number
    assert pinned.keys() == set(PACKAGES.values()) | REQUIRED_UNIMPORTED
    imported = {name for source in sources.values() for name in re.findall(r"^(?:import|from) (\w+)", source, re.M)}
    assert imported - set(sys.stdlib_module_names) == set(PACKAGES)


@pytest.mark.parametrize("before, after, message", [
    ("return x + out if self.residual else out", "return x + out", "Block has drifted"),
    ("# a view: painting it paints the picture", "# a copy", "mark_patches has drifted"),
    ("lorenz_slope: float = 0.5", "lorenz_slope: float = 1.0", "--lorenz_slope differs"),
    ("passes over those frames,", "passes,", "--mae_epochs differs"),
    ("def ratio_to_patches(", "def embed_salient_patches(x):\n    pass\n\n\ndef ratio_to_patches(",
     "embed_salient_patches is in"),
    ("\nHELD_OUT_FRAMES = 256", "\nHELD_OUT_FRAMES: int = 256", "HELD_OUT_FRAMES has drifted"),
    ("# Each purpose has", "# Every purpose has", "ACT has drifted"),
    ("import tyro\n", "import tyro as F\n", "F is not what it is"),
    ("import json", "import json\nimport scipy", "imports scipy"),
    ("import json", "import json\nfrom spirl_rainbow import Replay", "imports a sibling"),
    ("    coverage: float", "    never: int = 1  # nothing reads it\n    coverage: float", "reads Args.never"),
])
def test_the_checker_sees_each_kind_of_drift(sources, before, after, message):
    assert sources["spirl_mae.py"].count(before) == 1
    changed = {**sources, "spirl_mae.py": sources["spirl_mae.py"].replace(before, after)}
    found = drift(changed)
    assert found and message in found[0]
    assert len(found) == (6 if "purpose" in before else 1)  # six names stand in that one line
