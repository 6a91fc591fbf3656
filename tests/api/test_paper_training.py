"""The paper's training sections: generators that tell the truth, models that differ in attention alone, a quick run."""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
ndimage = pytest.importorskip("scipy.ndimage")
nnx = pytest.importorskip("flax.nnx")

ROOT = pathlib.Path(__file__).parents[2]
SIDES = (32, 64, 128, 256)
SECTIONS = (
    "gpt2_small",
    "gpt2_curves",
    "gpt2_context",
    "bert",
    "lra_speed",
    "lra_accuracy",
    "pathfinder",
)


@pytest.fixture
def module(monkeypatch):
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(f"benchmarks.paper.{name}")


@pytest.mark.parametrize("side", SIDES)
def test_discs_are_connected_as_the_label_says(module, side):
    """On the skeleton, drawn large: what lies no farther apart than a gap belongs together."""
    images = module("pathfinder_images")
    style, scale = images.STYLES[side], 6
    drawings = images.plan(side, style, 100, np.random.default_rng(0))
    dashes = np.where(drawings.dashes < images.FAR, drawings.dashes * [[scale], [1]], images.FAR)
    large = style._replace(dash=style.dash * scale, gap=style.gap * scale, width=1.0, radius=1.0)
    count = len(drawings.labels)
    assert count >= 3
    scaled = drawings._replace(dashes=dashes, discs=drawings.discs * scale)
    for drawn, discs, label in zip(
        images.draw(side * scale, large, scaled), scaled.discs, drawings.labels, strict=True
    ):
        near = ndimage.distance_transform_edt(drawn < 128) <= scale * (style.gap + 0.3) / 2
        components, _ = ndimage.label(near)
        first, second = (components[tuple(disc.astype(int))] for disc in discs)
        assert first and second and (first == second) == bool(label)


def test_pathfinder_images_are_deterministic_balanced_and_told_by_the_curves_alone(module):
    images = module("pathfinder_images")
    drawn, labels = images.examples(32, 300, [1, 2])
    again, same = images.examples(32, 300, [1, 2])
    other, _ = images.examples(32, 300, [1, 3])
    np.testing.assert_array_equal(drawn, again)
    np.testing.assert_array_equal(labels, same)
    assert not np.array_equal(drawn, other)
    assert drawn.shape == (300, 32, 32) and drawn.dtype == np.uint8 and drawn.max() == 255
    assert abs(labels.mean() - 0.5) < 0.1

    drawings = images.plan(32, images.STYLES[32]._replace(distractors=0), 6000, np.random.default_rng(0))
    apart = images.distance(drawings.discs)
    by_distance = [np.mean((apart < limit) == drawings.labels) for limit in np.quantile(apart, np.linspace(0, 1, 9))]
    assert np.abs(np.array(by_distance) - 0.5).max() < 2 / np.sqrt(len(apart))  # four standard deviations


def test_no_room_for_any_image(module):
    images = module("pathfinder_images")
    crowded = images.STYLES[32]._replace(dashes=40)
    assert len(images.plan(32, crowded, 4, np.random.default_rng(0)).labels) == 0


def value(module, tokens: list[str]) -> int:
    """Of a list, evaluated with a stack."""
    stack: list[list] = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token])
        elif token == "]":
            name, *values = stack.pop()
            stack[-1].append(module("listops").OPERATORS[name](values))
        else:
            stack[-1].append(int(token))
    return stack[0][0]


def test_listops_examples_have_the_value_that_they_say(module):
    listops = module("listops")
    tokens, lengths, values = listops.examples(20, 50, 300, 0)
    for row, length, expected in zip(tokens, lengths, values, strict=True):
        assert 50 <= length <= 300 and row[:length].all() and not row[length:].any()
        assert value(module, [listops.TOKENS[i] for i in row[:length]]) == expected
    np.testing.assert_array_equal(listops.examples(20, 50, 300, 0)[0], tokens)
    assert value(module, "[MAX 4 [MED 1 5 8 ] 2 ]".split()) == 5
    assert value(module, "[SM 9 [MIN 7 3 ] ]".split()) == 2


def test_text_is_held_out_by_file_and_every_byte_is_predicted_once(module):
    text = module("text")
    files = text.sources(100)
    assert len({file.content for file in files}) == len(files)
    training, held_out = text.tokens(files, False), text.tokens(files, True)
    assert len(training) + len(held_out) == sum(len(file.content) + 1 for file in files)
    for length in (16, 64):
        predicted = np.concatenate(
            [rows[:, 1:].ravel() for rows in text.stretches(training, 64 // length, length, 640)]
        )
        np.testing.assert_array_equal(predicted, training[1:641])


def small(models, **options):
    return models.Config(2, 32, 2, 64, (4, 8), 16, classes=3, **options)


def test_variants_of_a_model_compute_the_same(module):
    models = module("models")
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, 16)
    lengths = jnp.array([32, 20])

    def outputs(**options):
        config = small(models, **options)
        model = models.Transformer(config, nnx.Rngs(0))
        return model.classify(model(tokens, lengths), lengths)

    # With one block the butterfly is everything.
    for causal in (False, True):
        standard = outputs(attention="standard", causal=causal)
        for attention in ("flash", "block-sparse"):
            np.testing.assert_allclose(outputs(attention=attention, causal=causal), standard, atol=0.02)


def test_standard_attention_is_that_of_jax_nn(module):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 2, 16))
    lengths = jnp.array([32, 20])
    for causal in (False, True):
        ours = module("models").standard_attention(q, k, v, lengths, causal=causal, rate=0.0, dropout_key=None)
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=causal, key_value_seq_lengths=lengths)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_dropout_keeps_the_mean(module):
    models = module("models")
    kept = models.dropout(jnp.ones((200, 200)), 0.1, jax.random.key(0, impl="rbg"))
    assert abs(float((kept == 0).mean()) - 26 / 256) < 0.01
    assert abs(float(kept.mean()) - 1) < 0.01


def test_flops_and_parameters_of_gpt2(module):
    """124 M and 355 M, but for the padding of the vocabulary."""
    gpt2, models = module("gpt2"), module("models")
    for name, millions in (("small", 124), ("medium", 355)):
        config = gpt2.CONFIGS[name]
        shapes = nnx.eval_shape(lambda config=config: models.Transformer(config, nnx.Rngs(0)))
        count = sum(x.size for x in jax.tree.leaves(nnx.state(shapes)))
        assert round(count / 1e6) == millions
        assert config.flops_per_token(count) == 6 * count + 12 * config.layers * config.width * 1024


def test_positions_are_interpolated_from_a_checkpoint(module, tmp_path):
    models, pathfinder = module("models"), module("pathfinder")
    config = small(models)
    _, weights = nnx.split(models.Transformer(config, nnx.Rngs(0)))
    _, larger = nnx.split(models.Transformer(dataclasses.replace(config, grid=(8, 16)), nnx.Rngs(1)))
    np.savez(tmp_path / "weights.npz", *jax.tree.leaves(weights))
    stretched = pathfinder.interpolated(tmp_path / "weights.npz", larger)
    assert jax.tree.structure(stretched) == jax.tree.structure(larger)
    for old, new, expected in zip(*map(jax.tree.leaves, (weights, stretched, larger)), strict=True):
        assert new.shape == expected.shape
        if old.shape == new.shape:
            np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_quick_run(tmp_path):
    def run(*flags: object) -> None:
        command = [sys.executable, "-m", "benchmarks.paper", *flags, "--quick", "--output", tmp_path]
        command += ["--checkpoint", tmp_path / "checkpoint"]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run(*SECTIONS)
    run("pathfinder", "--side", 64)
    results = {name: json.loads((tmp_path / f"paper_{name}.json").read_text()) for name in SECTIONS}
    for name in ("gpt2_small", "bert", "lra_speed"):
        assert all(row["seconds_a_step"] > 0 and row["bytes"] > 0 for row in results[name]["rows"])
    assert results["gpt2_curves"]["largest_gap"]["standard and flash"]["training"] < 0.02
    assert {row["seed"] for row in results["gpt2_context"]["rows"]} == {0, 1}
    for row in results["lra_accuracy"]["rows"]:
        assert row["interval"][0] <= row["accuracy"] <= row["interval"][1]
    assert [stage["side"] for stage in results["pathfinder"]["stages"]] == [32, 64]
