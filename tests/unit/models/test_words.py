"""The policy for word problems: its tokenizer, its folder, and its random start."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tlt.models import words  # noqa: E402
from tlt.tasks.chat import Chat  # noqa: E402
from tlt.tasks.stories import texts  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words.make(tmp_path_factory.mktemp("models") / "words")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["Rosa took 2.", "\n<answer>7</answer>", "naïve Ωmega 漢字\t\x00"])
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_word_of_a_story_is_a_token(tokenizer: Any) -> None:
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in texts(200, seed=1):
        num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert num_tokens <= 1.02 * len(split(text))


def test_a_question_becomes_a_prompt(folder: Path, tokenizer: Any) -> None:
    prompt = Chat(str(folder)).prompt("Rosa took 2.")
    assert tokenizer.decode(prompt) == "<|user|>Rosa took 2.<|end|><|assistant|>"
    assert Chat(str(folder)).answered("Rosa took 2.", "So 3.")[0][-1] == tokenizer.eos_token_id


def test_the_folder_is_a_small_llama_for_three_layers_of_states(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers >= 3
    assert 0.5e6 < sum(each.numel() for each in model.parameters()) < 3e6
    assert sum(file.stat().st_size for file in words.HELD.iterdir()) < 5 * 2**20


def test_the_policy_answers_a_story(folder: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = "The farm has 4 eggs. Rosa took 2. How many eggs are left?"
    prompt = Chat(str(folder)).prompt(question)
    done = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)[0]
    text = tokenizer.decode(done[len(prompt) :])
    assert "Rosa" in text
    assert text.endswith("<answer>2</answer><|end|>")


def test_the_random_start_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    made = [words.untrained(tmp_path / name, texts(300)) for name in ("a", "b")]
    for name in ("model.safetensors", "tokenizer.json"):
        first, second = ((folder / name).read_bytes() for folder in made)
        assert first == second
