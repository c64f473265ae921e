"""Prompts of five kinds, because what a draft is worth depends on the text: copying is easy to foresee, open writing is not."""

PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python class `Stack` with the methods push, pop, peek, is_empty and size, with a docstring for each one.",
        "Write a Python function that reads a CSV file with the columns name, age and city and returns a list of dicts.",
        "Write unit tests with pytest for a function `add(a, b)` that adds two numbers: integers, floats, negatives, zero.",
    ),
    "editing": (
        "Repeat the following text word for word, but replace every 'cat' by 'dog':\n"
        "The cat sat on the mat. The cat looked at the door. When the door opened, the cat ran into the garden. "
        "In the garden the cat saw another cat under the old apple tree.",
        "Extract all names and dates from this text as a list with one entry per line:\n"
        "Anna Schmidt was born on 3 May 1961 in Hamburg. Her brother Peter Schmidt followed on 12 June 1964. "
        "Their cousin Maria Keller was born on 30 August 1970 in Bonn.",
        "Return this JSON with the key 'price' renamed to 'cost' everywhere and nothing else changed:\n"
        '[{"item": "pen", "price": 2}, {"item": "book", "price": 12}, {"item": "lamp", "price": 30}, '
        '{"item": "desk", "price": 140}]',
    ),
    "agent": (
        "You move files with tools, one JSON call per line. Calls so far:\n"
        '{"tool": "read_file", "arguments": {"path": "src/app/config.py", "encoding": "utf-8"}}\n'
        '{"tool": "write_file", "arguments": {"path": "lib/app/config.py", "encoding": "utf-8"}}\n'
        '{"tool": "read_file", "arguments": {"path": "src/app/router.py", "encoding": "utf-8"}}\n'
        '{"tool": "write_file", "arguments": {"path": "lib/app/router.py", "encoding": "utf-8"}}\n'
        "Write the calls that move src/app/models.py, src/app/views.py and src/app/forms.py to lib/app in the same way.",
        "Your function failed its test. Correct it and write the whole function again.\n"
        "def average(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(value)\n"
        "TypeError: object of type 'int' has no len(), in the line: return total / len(value)",
        "Thought: I need the weather in three cities.\n"
        'Action: {"name": "get_weather", "parameters": {"city": "Hamburg", "unit": "celsius"}}\n'
        'Observation: {"city": "Hamburg", "temperature": 12, "unit": "celsius", "condition": "rain"}\n'
        "Thought: I have the weather in Hamburg. Now I need the weather in Bonn.\n"
        'Action: {"name": "get_weather", "parameters": {"city": "Bonn", "unit": "celsius"}}\n'
        'Observation: {"city": "Bonn", "temperature": 15, "unit": "celsius", "condition": "cloudy"}\n'
        "Continue in the same format with Bremen, then list all three observations as JSON.",
    ),
    "summary": (
        "Summarise in three sentences: The Amazon rainforest covers much of the Amazon basin in South America. The basin "
        "spans seven million square kilometres, of which five and a half are covered by the rainforest. The region includes "
        "territory of nine nations. Most of the forest lies within Brazil, followed by Peru and Colombia. The forest is home "
        "to millions of species of insects, plants, fish and birds, and it stores much of the carbon bound in plants.",
        "Summarise in two sentences: Photosynthesis is the process by which plants, algae and some bacteria turn light energy "
        "into chemical energy. Carbon dioxide and water are converted into sugar and oxygen. The process takes place in "
        "chloroplasts, which contain the green pigment chlorophyll. Nearly all life on Earth depends on it.",
        "What are the key points of this text? The printing press, invented by Johannes Gutenberg around 1440, made it "
        "possible to produce books quickly and cheaply. Before, books were copied by hand and only the rich could afford "
        "them. Within fifty years millions of books were printed in Europe, literacy rose, and new ideas spread faster.",
    ),
    "open": (
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "What would a city look like if it had been designed by birds? Describe a morning there.",
        "Write a letter from an old oak tree to the children who climb in it.",
    ),
}
