"""Rows with images: as they are in JSONL and Parquet, their tokens, when they are read, what is refused."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import data
from images import reader
from models import save_tokenizer
from support.rows import jsonl
from vision_models import IMAGE, START, encoded_picture, make_vision_model

SIDES = ((64, 32), (32, 96), (32, 32))  # of the pictures: 2, 3 and 1 features


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl", layers=1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number, sides in enumerate(SIDES):
        (tmp_path / f"pictures/{number}.png").write_bytes(encoded_picture(*sides, seed=number))
    return tmp_path


def prompts_of(model, path, room=200, **options):
    eyes, tokenizer = reader.reader_of(model), data.load_tokenizer(model)
    if options.pop("template", False):
        turn = "{{ turn.content }}{{ eos_token }}"
        tokenizer.chat_template = f"{{% for turn in messages %}}{turn}{{% endfor %}}"
    return data.PromptFile(path, tokenizer, room, reader=eyes, **options)


def write(folder, *rows):
    return jsonl(folder / "rows.jsonl", rows)


ROWS = [
    dict(prompt="<image>=", images=["pictures/0.png"], answer=1),
    dict(prompt="0<image>+<image>=", images=["pictures/1.png", "pictures/2.png"], answer=2),
    dict(prompt="7+5=", answer=12),
]


def check(prompts, folder):
    """That these are ROWS."""
    assert [prompt.answer_key for prompt in prompts] == ["1", "2", "12"]
    assert [prompt.question for prompt in prompts] == [row["prompt"] for row in ROWS]
    bytes_of = [(folder / f"pictures/{number}.png").read_bytes() for number in range(3)]
    found = [prompt.images() for prompt in prompts]
    read = [[image.read() for image in images] for images in found]
    assert read == [bytes_of[:1], bytes_of[1:], []]
    assert [image.features for images in found for image in images] == [2, 3, 1]
    assert [prompt.tokens.count(IMAGE) for prompt in prompts] == [2, 3 + 1, 0]
    assert [prompt.tokens.count(START) for prompt in prompts] == [1, 2, 0]


def test_jsonl_with_paths_beside_it(model, folder):
    check(prompts_of(model, write(folder, *ROWS)), folder)


@pytest.mark.parametrize("kind", ["paths", "image features"])
def test_parquet(model, folder, kind):
    columns = {name: [str(row[name]) for row in ROWS] for name in ("prompt", "answer")}
    columns["images"] = [row.get("images", []) for row in ROWS]
    path = folder / "rows.parquet"
    if kind == "paths":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        content = lambda name: {"bytes": (folder / name).read_bytes(), "path": None}  # noqa: E731
        columns["images"] = [[content(name) for name in names] for names in columns["images"]]
        text = {name: datasets.Value("string") for name in ("prompt", "answer")}
        features = datasets.Features(text | {"images": datasets.List(datasets.Image(decode=False))})
        datasets.Dataset.from_dict(columns, features=features).to_parquet(path)
    check(prompts_of(model, path), folder)


def test_chat_parts_are_what_a_text_with_places_is(model, folder):
    text, last = {"type": "text", "text": "add "}, {"type": "text", "text": "and 5", "image": None}
    parts = [text, {"type": "image"}, last]
    contents = (parts, "add <image>and 5")
    rows = [dict(messages=[{"role": "user", "content": content}]) for content in contents]
    path = write(folder, *(row | dict(images=["pictures/0.png"]) for row in rows))
    first, second = prompts_of(model, path, template=True)
    assert first == second and first.question == "add <image>and 5"
    assert first.tokens.count(IMAGE) == 2


def test_a_text_cannot_spell_an_image_in_a_chat(model, folder):
    turn = {"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}
    (prompt,) = prompts_of(model, write(folder, dict(messages=[turn])), template=True)
    assert not {IMAGE, START} & {*prompt.tokens}


def test_images_are_read_when_a_group_is_taken(model, folder):
    """Once for a group, whose samples share them; a prompt holds no bytes."""
    source = data.Shuffled(prompts_of(model, write(folder, ROWS[0])), seed=0)
    prompts = data.Prompts(source, 3, keeps_groups=True, has_images=True)
    group = prompts.group(0)
    assert len({id(sample.media) for sample in group}) == 1 and len(group[0].media) == 1
    other = encoded_picture(64, 32, seed=9)
    (folder / "pictures/0.png").write_bytes(other)
    assert prompts.group(0)[0].media[0].read() == other
    for sample in group:
        sample.media = ()
    prompts.requeue([0], [group])
    again = prompts.group(0)
    assert again == group and again[0].media[0].read() == other


def test_the_room_is_counted_after_expansion(model, folder):
    """16 features at most: where that doesn't tell that a prompt fits, it is read."""
    rows = [row | dict(prompt="a" * 20 + row["prompt"]) for row in ROWS]
    longest = max(len(prompt.tokens) for prompt in prompts_of(model, write(folder, *rows)))
    assert len(prompts_of(model, write(folder, *rows), room=longest)) == 3
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: the prompt has {longest} tokens"):
        prompts_of(model, write(folder, *rows), room=longest - 1)
    assert len(prompts_of(model, write(folder, *rows), room=longest - 1, skip_long=True)) == 2


ONE = dict(prompt="<image>=", images=["pictures/0.png"])
CHAT, OWN, VIDEO = {"role": "user"}, {"type": "image", "image": "a.png"}, {"type": "video"}
PATH = "an image is a file's path or its bytes"
REFUSED = {  # what is wrong with a row -> how its line goes on
    "no place": (ONE | dict(prompt="="), "1 images for 0 places, <image> or an image part"),
    "no image": (dict(prompt="<image>="), "0 images for 1 places"),
    "an address": (ONE | dict(images=["https://a.b/c.png"]), f"{PATH}, not 'https"),
    "a file's address": (ONE | dict(images=["file:///etc/passwd"]), PATH),
    "no such file": (ONE | dict(images=["pictures/9.png"]), r".*pictures/9.png: no such file"),
    "no path": (ONE | dict(images=["A" * 5000]), r".*A: no such file"),
    "videos": (dict(prompt="=", videos=["a.mp4"]), "videos are not supported"),
    "a video part": (dict(messages=[CHAT | dict(content=[VIDEO])]), "a part {'type': 'video'}"),
    "a part's own image": (dict(messages=[CHAT | dict(content=[OWN])]), "a part {'type': 'image',"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_cannot_be_used_is_refused_at_once(model, folder, kind):
    row, problem = REFUSED[kind]
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: {problem}") as error:
        prompts_of(model, write(folder, ROWS[0], row), template=True)
    assert "\n" not in str(error.value)


def test_a_model_of_texts_refuses_images(folder, tmp_path):
    tokenizer = data.load_tokenizer(str(save_tokenizer(tmp_path)))
    texts = data.PromptFile(write(folder, dict(prompt="<image>")), tokenizer, 100)
    assert tokenizer.decode(texts[0].tokens) == "<image>"  # a text like any other
    refused = r"rows.jsonl:1: it has images, and --model reads text alone"
    with pytest.raises(ValueError, match=refused):
        data.PromptFile(write(folder, *ROWS), tokenizer, 100)
