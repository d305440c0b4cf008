"""Layouts as data: which rank holds which part of a model, how people write layouts, and which can't be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import Config
from extras.apart.placements import placement_from, ranks_from
from placement import make_placement
from runtime.errors import UserError
from scheduling.layout import Placement, Shape, ranks_in_words

PPO = ("ppo", "kl_coef=0.1")
SIZES = [*itertools.product((1, 2, 3, 4), repeat=3)]  # tp, pp, dp


@st.composite
def shapes(draw, most=12):
    """Draw any ascending ranks, and sizes that divide them."""
    ranks = draw(st.sets(st.integers(0, 40), min_size=1, max_size=most))
    sizes = []
    left = len(ranks)
    for _ in range(2):
        sizes.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= sizes[-1]
    return Shape(tuple(sorted(ranks)), *sizes)


@pytest.mark.parametrize("step", [1, 3])
def test_a_shape_is_laid_out_as_by_megatron(step):
    """All small sizes, on neighboring ranks and others, must have its replicas and leads; others no place."""
    from training.groups import ORDER, mpu

    for tp, pp, dp in SIZES:
        ranks = tuple(range(2, 2 + step * tp * pp * dp, step))
        shape = Shape(ranks, tp, pp)
        generator = mpu.RankGenerator(tp, 1, dp, pp, 1, ORDER)
        expected = [[ranks[at] for at in row] for row in generator.get_ranks("tp-pp")]
        assert (shape.copies, shape.dp, shape.copy_size) == (expected, dp, tp * pp)
        # Megatron's place among the ranks of one data-parallel group is the share of the samples
        for row in generator.get_ranks("dp"):
            places = [shape.position_of(ranks[at]) for at in row]
            assert [dp_rank for dp_rank, _ in places] == list(range(dp))
            assert len({is_lead for _, is_lead in places}) == 1
        leads = [rank for rank in ranks if shape.position_of(rank)[1]]
        assert leads == sorted(copy[0] for copy in shape.copies)
        assert shape.position_of(0) is shape.position_of(ranks[-1] + 1) is None


def placement_of(words: str, default: Shape) -> Placement:
    config = Config(placement=words, tp=default.tp, pp=default.pp, rule=("right",))
    return placement_from(default.ranks, config)


@given(st.sets(st.integers(0, 60), min_size=1), shapes(), shapes(), shapes(), shapes())
def test_what_is_written_is_read(engines, actor, critic, reference, default):
    placement = Placement(tuple(sorted(engines)), actor, critic, reference)
    assert placement_of(str(placement), default) == placement
    assert ranks_from(ranks_in_words(placement.engines)) == placement.engines


def test_words_that_people_write():
    """A missing part takes the default's, or the actor's; if one size is given, others are 1."""
    default = Shape((0, 1, 2, 3), tp=2)
    found = placement_of("engines=0,2-3 actor=0-1:pp2:tp1 critic=2-3:tp2", default)
    actor = Shape((0, 1), tp=1, pp=2)
    assert found == Placement((0, 2, 3), actor, Shape((2, 3), tp=2), actor)
    expected = Placement(default.ranks, default, default, Shape((1,), tp=2))
    assert placement_of("reference=1", default) == expected
    words = "engines=0,2-3 actor=0-1:pp2 critic=2-3:tp2 reference=0-1:pp2"
    assert str(found) == words
    assert not found.is_apart and found.learners == {0, 1, 2, 3}


STANDALONE = dict(placement="standalone")
FUSED = dict(schedule="fused", algorithm=PPO)
CRITIC_BESIDE = "engines=0-1 actor=2 critic=1"
REFUSED = [
    ("engines=", {}, 2, "'' is not a list of ranks: write it as 0-3,6"),
    ("engines=0,,1", {}, 2, "'0,,1' is not a list of ranks"),
    ("engine=0", {}, 2, "engine is not one of engines, actor, critic, reference"),
    ("actor=0:tp", {}, 2, "'tp' is not a size: write it as tp2 or pp2"),
    ("actor=tp2", {}, 2, "'tp2' is not a list of ranks"),
    ("rows", {}, 2, "choose one of colocate, split, standalone"),
    ("engines=0,0 actor=1", {}, 2, "the ranks of engines aren't in ascending order"),
    ("engines=0-1 actor=3", {}, 4, "rank 2 holds nothing"),
    ("engines=0-1 actor=2:tp2", {}, 3, "tp 2 x pp 1 = 2 doesn't divide the 1 ranks of"),
    ("engines=0-2 actor=1-3", {}, 3, "actor on rank 3: there are 3 ranks, from 0"),
    ("engines=1 actor=0", {}, 2, "rank 0 needs an engine, because it saves the position in"),
    ("engines=0 actor=0 critic=1", {}, 2, "--algorithm grpo has no critic"),
    ("split", {}, 2, "--algorithm grpo has no critic"),
    ("engines=0 actor=0 reference=1", {}, 2, "--algorithm grpo without kl_coef has no referen"),
    ("split", dict(algorithm=PPO), 1, "critic has no rank"),
    ("standalone", dict(algorithm=PPO), 2, "rank 0 needs an engine, because it saves"),
    ("colocate", dict(ahead=1), 2, "--ahead 1 needs engines on ranks that train nothing"),
    ("split", FUSED, 4, "--schedule fused needs actor and critic on"),
    (CRITIC_BESIDE, dict(ahead=1, algorithm=PPO), 3, "--ahead 1 needs engines on ranks that"),
]


@pytest.mark.parametrize("text,changes,size,message", REFUSED)
def test_placements_that_cannot_be(text, changes, size, message):
    with pytest.raises(UserError) as raised:
        make_placement(Config(placement=text, **changes), size)
    line = str(raised.value)
    assert line.startswith(f"--placement {text}: ") and message in line and "\n" not in line


ROWS = [
    ("colocate", 3, (0, 1, 2), (0, 1, 2), (0, 1, 2)),
    ("split", 5, (0, 1, 2, 3, 4), (0, 1, 2), (3, 4)),
    ("standalone", 3, (0,), (1,), (2,)),
    ("standalone", 8, (0, 1, 2, 3), (4, 5), (6, 7)),
]


def test_rows_of_the_table():
    """No replica of tp 2 may be cut, and without a critic the actor has its part of the ranks."""
    for text, size, engines, actor, critic in ROWS:
        placement = make_placement(Config(placement=text, algorithm=PPO), size)
        assert placement == Placement(engines, Shape(actor), Shape(critic), Shape(actor))
        assert placement.is_apart == (text == "standalone")
    placement = make_placement(Config(placement="split", algorithm=PPO, tp=2), 6)
    assert (placement.actor, placement.critic) == (Shape((0, 1, 2, 3), 2), Shape((4, 5), 2))
    placement = make_placement(Config(tp=2, **STANDALONE), 6)
    assert (placement.engines, placement.actor) == ((0, 1, 2, 3), Shape((4, 5), 2))
    assert placement.critic == placement.actor
