from pathlib import Path

import pytest
from checkpoints import Tiny

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.recipe import _decode as decode
from ferrule_convert.recipe import apply, load_recipe, recipe_names
from ferrule_convert.schemes import Scheme
from ferrule_runtime.errors import RecipeError


def test_names_of_shipped_recipes_decode_to_what_their_files_say(tiny: Tiny) -> None:
    graph = build(open_checkpoint(tiny.path))
    assert {"fp32", "w8", "w4g32", "w4g128"} <= set(recipe_names())
    for name in recipe_names():
        from_file, from_name = load_recipe(name), decode(name)
        assert from_name is not None
        for weight in graph.weights():
            schemes = {next(r.scheme for r in rules if r.pattern in (weight.name, "*"))
                       for rules in (from_file.rules, from_name)}  # fmt: skip
            assert len(schemes) == 1, (name, weight.name)


def test_a_name_decodes_itself() -> None:
    rules = {rule.pattern: rule.scheme for rule in load_recipe("w4g64z_head4").rules}
    assert rules == {
        "embedding": Scheme(4, 32),
        "head": Scheme(4, 32),
        "layers.*.delta.[ab]": None,
        "*": Scheme(4, 64, zero=True),
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("w4g23", "group 23"),
        ("w3", "3 bits"),
        ("w4g32_magic", "unknown scheme `magic`"),
        ("w4g32_head5", "5 bits"),
        ("wg32", "did you mean `w4g32`"),
        ("nothing.toml", "cannot be read"),
    ],
)
def test_what_cannot_be_executed_is_refused_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert says in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("description = 3\n", "description"),
        ('description = "x"\n[[rule]]\npattern = "*"\nbitz = 4\n', "bitz"),
        ('description = "x"\n[[rule]]\npattern = "*"\nbits = 5\n', "5 bits"),
        ("description = [", "not TOML"),
    ],
)
def test_a_malformed_file_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=says):
        load_recipe(str(path))


def test_a_weight_that_no_rule_matches_is_an_error(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "only the mlp"\n[[rule]]\npattern = "layers.*.mlp.*"\nbits = 4\n')
    with pytest.raises(RecipeError, match=r"no rule matches `layers.0.attention.q`"):
        apply(build(open_checkpoint(tiny.path)), load_recipe(str(path)))


def test_a_group_that_does_not_divide_says_which_do(tiny: Tiny) -> None:
    with pytest.raises(RecipeError) as caught:
        apply(build(open_checkpoint(tiny.path)), load_recipe("w4g128"))
    assert "whose rows have 64 weights" in str(caught.value)
    assert "16, 32, 64" in caught.value.hint


def test_the_key_changes_with_the_rules_and_with_nothing_else(tmp_path: Path) -> None:
    for name, description, bits in (("a", "one", 4), ("b", "two", 4), ("c", "one", 8)):
        (tmp_path / f"{name}.toml").write_text(
            f'description = "{description}"\n[[rule]]\npattern = "*"\nbits = {bits}\n'
        )
    keys = [load_recipe(str(tmp_path / f"{name}.toml")).key.split("@")[1] for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
