"""Bad input, to all three scripts: one line that names the flag, what is wrong and what would work; exit status 2."""

import dataclasses
import math
import random
import re

import pytest
import torch
from conftest import SCRIPTS, run, run_here

import spirl_mae
import spirl_rainbow

MAE_ALL, RANDOM = ["--method", "mae-all"], ["--method", "de-rainbow-p"]
WATCH = ["--mae-checkpoint", "right.pt", "--agent-checkpoint"]

COMMON = [
    (["--env-id", "ALE/Frostbit-v5"], "--env-id ALE/Frostbit-v5 is not an Atari game .* ALE/Frostbite-v5"),
    (["--device", "cuda:99"], r"--device cuda:99 cannot be used \(.*\); give auto, cpu"),
    (["--run-name", "taken"], "--run-name taken: runs/taken already exists; give another name"),
    (["--resume", "nowhere", "--seed", "2"], "--resume uses the run's own arguments"),
    (["--device", "meta"], r"--device meta cannot be used \(.*meta.*\); give auto, cpu"),
]
for name in ("nowhere", "damaged", "other", "null", "None", ""):
    COMMON.append((["--resume", name], f"--resume {name} is not the folder of an unfinished run"))
OF_MAE = [
    (["--image-size", "100"], "--image-size 100 must be --patch-size 8 times a whole number"),
    (["--image-size", "16"], "--image-size 16 must be --patch-size 8 times a whole number, at least 3"),
    (["--encoder-heads", "5"], "--encoder-dim 64 must be a multiple of --encoder-heads 5"),
    (["--decoder-dim", "66", "--decoder-heads", "2"], "--decoder-dim 66 must be a multiple of --decoder-heads 2"),
    (["--mae-checkpoint", ""], "there is no file ''; give another"),
    (["--mae-mask-spread", "0.25"], r"--mae-mask-ratio 0.75 must be from --mae-mask-spread \(0.25\) to below 0.743"),
    (["--mae-mask-ratio", "0.3", "--mae-mask-spread", "0.4"], "--mae-mask-ratio 0.3 must be from --mae-mask-spread"),
    (["--mae-frames", "10"], "--mae-frames 10 must be at least --mae-batch-size 64"),
    (["--mae-batch-size", "6000"], "--mae-frames .*must be at least --mae-batch-size 6000"),
    (["--mae-checkpoint", "agent.pt"], "agent.pt does not fit the auto-encoder .* give a mae.pt"),
    (["--mae-checkpoint", "foreign.pt"], "foreign.pt does not fit the auto-encoder"),
    (["--mae-checkpoint", "small.pt"], "small.pt has image_size 24; give --image-size 24"),
    (["--mae-checkpoint", "pong.pt"], "pong.pt has env_id ALE/Pong-v5; give --env-id ALE/Pong-v5, or another"),
    (["--mae-checkpoint", "empty.pt", "--mae-epochs", "10"], "--mae-epochs is for pre-training"),
]
for name in (".", "empty.pt", "cut.pt", "random.pt", "code.pt"):
    message = rf"{name} cannot be read as a checkpoint \(\w+Error\); give another, or delete a run's own$"
    OF_MAE.append((["--mae-checkpoint", name], message))
OF_SELECTION = [(["--max-ratio", "0.001"], "--max-ratio 0.001 must keep at least one of 144")]
OF_AGENT = [
    (["--learning-starts", "20"], "--learning-starts 20 must be above --n-step .20. and at most 99999"),
    (["--total-timesteps", "2099", "--train-frequency", "500"], "--learning-starts 1600 must be .* at most 1599"),
    (["--buffer-size", "30"], "--buffer-size 30 must be at least --batch-size"),
    (["--num-atoms", "1"], "--num-atoms 1 must be at least 2"),
    (["--v-min", "10"], "--v-min 10.0 must be below --v-max 10.0, and both finite"),
    (["--v-max", "inf"], "--v-min -10.0 must be below --v-max inf, and both finite"),
]
ROWS = [(script, *row) for script in SCRIPTS for row in COMMON]
ROWS += [("spirl_rainbow.py", *row) for row in OF_MAE + OF_SELECTION + OF_AGENT]
ROWS += [("spirl_mae.py", *row) for row in OF_MAE + OF_SELECTION]
ROWS += [("spirl_baselines.py", [*MAE_ALL, *flags], message) for flags, message in OF_MAE]
ROWS += [("spirl_baselines.py", flags, message) for flags, message in OF_AGENT]
ROWS += [
    ("spirl_rainbow.py", ["--mae-checkpoint", "pong.pt", "--env-id", "ALE/Pong-v5"], "pong.pt has no counts"),
    ("spirl_rainbow.py", ["--mae-checkpoint", "steep.pt", "--env-id", "ALE/Pong-v5"], "steep.pt has no counts .* 0.5"),
    ("spirl_rainbow.py", ["--agent-checkpoint", "agent.pt"], "--agent-checkpoint needs --mae-checkpoint"),
    ("spirl_baselines.py", [*MAE_ALL, "--run-name", "taken"], "--run-name taken: runs/taken already exists"),
    ("spirl_rainbow.py", ["--agent-heads", "5"], "--agent-dim 32 must be a multiple of --agent-heads 5"),
    ("spirl_baselines.py", [*MAE_ALL, "--agent-heads", "5"], "--agent-dim 32 must be a multiple of --agent-heads 5"),
    ("spirl_rainbow.py", [*WATCH, "deep.pt"], "deep.pt was trained with --decoder-depth 2; give it too"),
    ("spirl_rainbow.py", [*WATCH, "fixed.pt"], "fixed.pt was trained with --selection fixed; give it too"),
    ("spirl_rainbow.py", [*WATCH, "nowhere.pt"], "there is no file"),
    ("spirl_rainbow.py", [*WATCH, "right.pt"], "right.pt is not an agent.pt of this script"),
    ("spirl_rainbow.py", [*WATCH, "agent.pt"], "agent.pt was trained with --env-id ALE/Seaquest-v5; give it too"),
    ("spirl_rainbow.py", [*WATCH, "wide.pt"], "wide.pt was trained with --agent-dim 64; give it too .None: leave it"),
    ("spirl_rainbow.py", [*WATCH, "old.pt", "--noisy-std", "0.4"], "old.pt was trained with --noisy-std 0.5; give"),
    ("spirl_mae.py", ["--coverage", "1"], "--coverage must be below 1"),
    ("spirl_baselines.py", ["--mae-checkpoint", "empty.pt"], "--mae-checkpoint is not for --method de-rainbow"),
    ("spirl_baselines.py", [*RANDOM, "--encoder-dim", "32"], "--encoder-dim is not for --method de-rainbow-p"),
    ("spirl_baselines.py", [*RANDOM, "--mae-frames", "20"], "--mae-frames 20 must be above"),
]
for flag in ("--mae-frames", "--image-size", "--patch-size", "--decoder-dim", "--agent-dim"):
    ROWS.append(("spirl_baselines.py", [flag, "48"], f"{flag} is not for --method de-rainbow; leave it out"))


@pytest.fixture
def folder(tmp_path):
    """A folder with what the rows name."""
    (tmp_path / "runs/taken").mkdir(parents=True)
    (tmp_path / "runs/taken/mae.pt").touch()  # of another game, perhaps
    stored = {"damaged": '{"seed": 1', "null": "null", "other": '{"foreign": 1, "checksum": 1}'}
    for name, content in stored.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(content)
    saved = {"small.pt": {"sizes": {"image_size": 24}}, "foreign.pt": {"model": 5}, "code.pt": {"model": print}}
    mae = {"model": spirl_mae.MaskedAutoencoder().state_dict(), "sizes": spirl_mae.mae_sizes(spirl_mae.Args())}
    saved |= {"right.pt": mae | {"env_id": "ALE/Frostbite-v5"}, "pong.pt": mae | {"env_id": "ALE/Pong-v5"}}
    saved["steep.pt"] = saved["pong.pt"] | {"salient_counts": {"lorenz_slope": 1.0}}
    trained_with = {"env_id": "ALE/Seaquest-v5"}, {"agent_dim": 64}, {"decoder_depth": 2}, {"selection": "fixed"}, {}
    for name, changed in zip(("agent.pt", "wide.pt", "deep.pt", "fixed.pt", "old.pt"), trained_with):
        saved[name] = {"model": {}, "args": vars(spirl_rainbow.Args(**changed)), "step": 100, "max_patches": 50}
    del saved["old.pt"]["args"]["noisy_std"]  # from before this flag
    for name, content in saved.items():
        torch.save(content, tmp_path / name)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "cut.pt").write_bytes((tmp_path / "pong.pt").read_bytes()[:1_000_000])
    (tmp_path / "random.pt").write_bytes(random.Random(0).randbytes(1000))
    return tmp_path


def test_each_row_gets_one_line_and_status_2_before_anything_is_created(folder, monkeypatch, refused):
    before = set(folder.rglob("*"))
    for script, flags, message in ROWS:
        with refused(message):
            run_here(folder, monkeypatch, *flags, script=script)
        assert set(folder.rglob("*")) == before, (script, flags)


def test_a_name_that_the_terminal_cannot_print(tmp_path):
    done = run(tmp_path, "--run-name", "été", script="spirl_mae.py", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stderr.startswith("error: --run-name or --resume has letters")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_notebooks_plotting_backend_is_no_obstacle(tmp_path, script):
    done = run(tmp_path, "--help", script=script, MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert done.returncode == 0 and done.stdout.startswith("usage"), done.stderr
    assert done.stdout.endswith(SCRIPTS[script].__doc__.split("\n\n")[2] + "\n")  # help ends in commands to copy


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_is_checked(script, refused):
    module, tried = SCRIPTS[script], 0
    shares = "gamma mae_mask_ratio mae_mask_spread max_ratio coverage priority_exponent priority_weight eval_epsilon"
    may_be_0 = shares + " seed checkpoint_frequency eval_frequency noisy_std mae_weight_decay"
    for field in dataclasses.fields(module.Args):
        if field.type not in (int, float, int | None, float | None) or field.name in ("v_min", "v_max"):
            continue
        wrong = [-1, 10**30, math.nan, math.inf] + [1.5] * (field.name in shares.split())
        if field.name in may_be_0.split():
            module.check_each(module.Args(**{field.name: 0}))
        else:
            wrong.append(0)
        for value in wrong:
            with refused(f"--{field.name.replace('_', '-')} is {re.escape(str(value))}; give "):
                module.check_args(module.Args(**{field.name: value}))
            tried += 1
    assert tried > (40 if script == "spirl_mae.py" else 80)
