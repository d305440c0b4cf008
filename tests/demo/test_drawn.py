"""The demo's pictures show its written problems; a cell is a feature."""

from config import DEMO_MODELS
from demo import task
from extras.images.drawing import picture
from extras.images.reader import ImageReader
from inputs.templates import IMAGE

OTHERS = ((57, 68, "b"), (58, 68, "a"), (57, 69, "a"))


def test_the_same_problems_are_written_and_drawn():
    """Seed and number must decide; a question with drawn numbers reveals nothing. A cell is a feature."""
    reader = ImageReader(str(DEMO_MODELS / "drawn" / "actor"))

    def characters(text, images):
        return [ord(c) for c in text] + [image.features for image in images]

    written, drawn = (task.Addition(3, characters, each) for each in (None, reader))
    pairs = [(written.training(i), drawn.training(i)) for i in range(20)]
    for one, other in [*pairs, *zip(list(written.held_out)[:50], drawn.held_out, strict=False)]:
        (image,) = other.images
        numbers = one.question.removesuffix("=").split("+")
        assert one.images == ()
        assert one.answer_key == other.answer_key and other.question == IMAGE + "="
        assert other.tokens == characters(IMAGE + "=", (image,))
        assert image.features == 2 * max(map(len, numbers))


def test_a_picture_follows_from_its_numbers_and_key():
    first, same, *others = (picture(*each) for each in ((57, 68, "a"),) * 2 + OTHERS)
    assert first == same and first not in others
