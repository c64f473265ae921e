"""Prompts to sample from: the kinds of `deployments.bench.prompts`, put together anew from parts, without end.

None of the benchmark's own prompts is among them: those measure the draft.
"""

import json
import random
from collections.abc import Callable, Iterator

NAMES = ("Anna", "Peter", "Maria", "Jonas", "Leila", "Wei", "Olga", "Samuel", "Priya", "Diego", "Hannah", "Kofi")
CITIES = ("Hamburg", "Bonn", "Lisbon", "Oslo", "Kyoto", "Nairobi", "Quito", "Toronto", "Cracow", "Sydney", "Tunis", "Pune")
THINGS = ("pen", "book", "lamp", "desk", "chair", "bicycle", "kettle", "clock", "ladder", "umbrella", "violin", "basket")
ANIMALS = ("cat", "dog", "horse", "fox", "owl", "whale", "spider", "rabbit", "swan", "bee", "tortoise", "wolf")
FIELDS = ("name", "age", "city", "price", "date", "email", "status", "count", "score", "id")
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust", "SQL", "Bash")
TASKS = (
    "sorts a list of {field}s in descending order",
    "counts how often each word occurs in a text",
    "finds the longest common prefix of two strings",
    "reads a JSON file with the keys {field} and {field2} and prints them as a table",
    "checks whether a number is prime",
    "merges two sorted lists",
    "removes duplicates from a list and keeps its order",
    "validates that {field} is not empty and raises an error otherwise",
    "computes the mean and the median of a list of numbers",
    "groups a list of dicts by {field}",
    "parses dates such as 2024-05-17 and returns the weekday",
    "implements a queue with two stacks",
    "converts temperatures between Celsius and Fahrenheit",
    "downloads a file and retries three times when that fails",
)
CODE = (
    "Write a {language} function that {task}.",
    "Write a {language} function that {task}, with a comment for every step and an example of its use.",
    "Write tests for a {language} function that {task}.",
    "Explain step by step how a {language} program {task}.",
    "Write a class {name}Store in {language} with methods to add, remove and find a {thing} by its {field}.",
)
TOPICS = (
    "photosynthesis", "the water cycle", "volcanoes", "the Roman Empire", "inflation", "the human heart", "electric cars",
    "black holes", "the French Revolution", "vaccines", "coral reefs", "the history of chess", "machine learning", "sleep",
    "renewable energy", "the Silk Road", "earthquakes", "democracy", "the Great Wall of China", "bread", "the moon", "jazz",
    "supply and demand", "migration of birds", "antibiotics", "the printing press", "glaciers", "public transport", "honey",
)  # fmt: skip
FACTS = (
    "{topic} is a subject that many people first meet at school.", "Experts have studied it for more than a century.",
    "In {city} a museum was opened about it in {year}.", "Its effects can be seen in everyday life.",
    "Some questions remain open, and research goes on.", "It has changed how people live and work.",
    "About {number} percent of those asked said that they knew little about it.", "{name} from {city} wrote a book about it.",
    "Its costs and benefits are not shared equally.", "New methods have made it easier to measure.",
)  # fmt: skip
SUMMARY = (
    "Summarise in two sentences: {text}",
    "What are the key points of this text? {text}",
    "Give this text a title and explain your choice: {text}",
    "Rewrite this text in simpler words: {text}",
)
OPEN = (
    "Write a short story about a {animal} who finds a {thing} in {city}.",
    "Write a letter from {name} to {name2} about {topic}.",
    "Explain {topic} to a child of ten.",
    "What are the advantages and disadvantages of {topic}?",
    "Give me five tips for somebody who wants to learn about {topic}.",
    "Write a poem about a {animal} and a {thing}.",
    "Plan a weekend in {city} for {name}, who likes {topic}.",
    "Why is {topic} important? Answer in three paragraphs.",
    "Write a dialogue between {name} and {name2} about a lost {thing}.",
    "What is the difference between {topic} and {topic2}?",
    "Who was the first to describe {topic}, and what followed from it?",
    "Compare a {animal} with a {animal2}.",
)
EDITING = (
    "Repeat the following text word for word, but replace every '{animal}' by '{animal2}':\n{story}",
    "Extract all names and places from this text as a list with one entry per line:\n{story}",
    "Correct the spelling of this text and change nothing else:\n{story}",
    "Put this text into the past tense:\n{story}",
    "Return this JSON with the key '{field}' renamed to '{field2}' and nothing else changed:\n{records}",
    "Turn this JSON into a Markdown table:\n{records}",
)
STORIES = (
    "The {animal} of {name} sleeps on the {thing}. When {name2} comes home from {city}, the {animal} runs into the garden. ",
    "{name} was born in {city} in {year}. {name2} followed two years later and bought a {thing}. ",
    "In {city} there is a shop that sells every {thing} for {number} euros. {name} works there, and so does a {animal}. ",
    "{name} and {name2} meet every summer. They talk about {topic} and feed the {animal}. ",
)
TOOLS = ("read_file", "write_file", "search", "get_weather", "send_email", "list_orders", "create_event", "run_query")
AGENT = (
    "You call tools, one JSON call per line. Calls so far:\n{calls}\nWrite the calls that do the same for {city} and {city2}.",
    "Thought: I need the {field} of a {thing}.\nAction: {call}\nObservation: {record}\nDo the same for a {thing2}.",
    "You have these tools: {tools}. Which of them do you call, and with which arguments, to {goal}?",
    "This call failed with 'missing argument {field}': {call}\nWrite it again with the argument, then say what changed.",
)
GOALS = (
    "tell {name} the weather in {city}",
    "find the newest order of a {thing} and mail it to {name}",
    "move a file to the folder {field}",
)


def recombined(draw: random.Random) -> str:
    """One prompt; each kind is as likely as any other."""
    return draw.choice(KINDS)(draw)


def endless(seed: int, shard: int) -> Iterator[str]:
    """The prompts of one shard of samples: the same for the same numbers."""
    draw = random.Random(f"{seed}/{shard}")
    while True:
        yield recombined(draw)


def _fill(draw: random.Random, pattern: str) -> str:
    """Every slot with a word of its kind; a 2 at its end asks for another word than the slot without."""
    words = {}
    for slot, choices in _SLOTS.items():
        words[slot], words[f"{slot}2"] = draw.sample(sorted(set(choices)), 2)
    words["year"], words["number"] = str(draw.randint(1850, 2020)), str(draw.randint(2, 95))
    return pattern.format(**words)


def _code(draw: random.Random) -> str:
    return _fill(draw, draw.choice(CODE).replace("{task}", draw.choice(TASKS)))


def _summary(draw: random.Random) -> str:
    text = " ".join(draw.sample(FACTS, draw.randint(3, 6)))
    return _fill(draw, draw.choice(SUMMARY).replace("{text}", text))


def _open(draw: random.Random) -> str:
    return _fill(draw, draw.choice(OPEN))


def _editing(draw: random.Random) -> str:
    story = "".join(draw.sample(STORIES, draw.randint(1, 3))).strip()
    pattern = draw.choice(EDITING).replace("{story}", story)
    before, slot, after = pattern.partition("{records}")
    records = json.dumps([_record(draw) for _ in range(draw.randint(2, 4))]) if slot else ""
    return _fill(draw, before) + records + _fill(draw, after)


def _agent(draw: random.Random) -> str:
    pattern = draw.choice(AGENT).replace("{goal}", draw.choice(GOALS))
    calls = "\n".join(_call(draw) for _ in range(draw.randint(2, 4)))
    inserted = {
        "{calls}": calls,
        "{call}": _call(draw),
        "{record}": json.dumps(_record(draw)),
        "{tools}": ", ".join(draw.sample(TOOLS, 4)),
    }
    marked = pattern
    for index, slot in enumerate(inserted):
        marked = marked.replace(slot, f"\x00{index}\x00")  # JSON has braces of its own
    filled = _fill(draw, marked)
    for index, text in enumerate(inserted.values()):
        filled = filled.replace(f"\x00{index}\x00", text)
    return filled


def _record(draw: random.Random) -> dict[str, str | int]:
    fields = draw.sample(FIELDS, draw.randint(2, 3))
    return {field: draw.choice((*NAMES, *CITIES, *THINGS, draw.randint(1, 200))) for field in fields}


def _call(draw: random.Random) -> str:
    return json.dumps({"tool": draw.choice(TOOLS), "arguments": _record(draw)})


_SLOTS = {
    "name": NAMES,
    "city": CITIES,
    "thing": THINGS,
    "animal": ANIMALS,
    "field": FIELDS,
    "language": LANGUAGES,
    "topic": TOPICS,
}
KINDS: tuple[Callable[[random.Random], str], ...] = (_code, _editing, _agent, _summary, _open)
