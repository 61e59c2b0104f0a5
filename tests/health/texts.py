"""Made-up texts for the detectors: healthy ones in many styles, and degenerate ones with the cause that must be named."""

from assay.health.degenerate import Expected

CODE, NUMBERS, SHORT = Expected(code=True), Expected(numbers=True), Expected(short=True)
THOUGHT = Expected(tags=("<think>", "</think>"), numbers=True)

PARAGRAPH = (
    "Rain that falls on the hills takes days to reach the river. It seeps through moss and peat, gathers in small channels, and only "
    "then joins the stream that people see from the road. When the soil is already full the water runs off at once, and the river "
    "rises within hours. That is why a wet week matters more than a single storm, and why those who live by the bridge look at the "
    "fields before they look at the sky.")

HEALTHY = {
    "paragraph": (PARAGRAPH, Expected()),
    "long": (PARAGRAPH + "\n\n" + PARAGRAPH.replace("river", "lake").replace("hills", "slopes").replace("days", "weeks"), Expected()),
    "one word": ("Blue.", SHORT),
    "yes": ("Yes", SHORT),
    "number": ("42", Expected(numbers=True, short=True)),
    "list": ("Here is what to pack:\n\n1. A warm coat\n2. Two pairs of socks\n3. A torch\n4. Bread and cheese\n5. A map\n6. Matches\n"
             "7. A whistle\n8. Sun cream", Expected()),
    "bullets": ("- apples\n- pears\n- plums\n- cherries\n- figs\n- dates\n- grapes\n- melons\n- kiwis\n- limes\n- lemons\n- oranges",
                Expected()),
    "one line of names": (", ".join(f"{a}{b}" for a in ("An", "Bel", "Cor", "Dan") for b in ("na", "ta", "ra", "lo", "mi")), Expected()),
    "table": ("| City | Rain | Sun |\n|------|------|-----|\n| Oslo | high | low |\n| Rome | low | high |\n| Lima | none | low |\n"
              "| Bonn | high | low |\n| Cork | high | low |\n| Pisa | low | high |", Expected()),
    "table of numbers": ("| n | n² | n³ |\n|---|---|---|\n" + "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(1, 15)), NUMBERS),
    "multiplication": ("\n".join(f"7 × {n} = {7 * n}" for n in range(1, 13)), NUMBERS),
    "zeros": ("\n".join(["0 0 0 0 0 0 0 0"] * 8), NUMBERS),
    "digits": ("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899", NUMBERS),
    "googol": ("A googol is 1" + "0" * 100, NUMBERS),
    "poem with a refrain": (
        "The ferry crossed at morning,\nand the bell rang low.\nThe gulls came down like paper,\nand the bell rang low.\n"
        "We counted all the windows,\nand the bell rang low.\nThe harbour kept its secrets,\nand the bell rang low.\n"
        "At noon the fog had lifted,\nand the bell rang low.", Expected()),
    "laughing": ("Ha ha ha ha! That is the best thing I have heard all week.", Expected()),
    "very": ("It was a very, very, very, very long way home.", Expected()),
    "dialogue": ("— Are you coming?\n— Not yet.\n— When?\n— Soon.\n— You said so before.\n— And meant it.\n— Fine.\n— Fine.", Expected()),
    "rule at the end": ("That is all there is to say.\n\n" + "-" * 70, Expected()),
    "rules": ("Part one\n========\n\nSome words here.\n\n* * * * * * * * * * * *\n\nPart two\n========\n\nMore words there.", Expected()),
    "python": ("def add(a, b):\n    \"\"\"The sum.\"\"\"\n    return a + b\n\n\nfor i in range(3):\n    print(add(i, i))\n", CODE),
    "braces": ("int main() {\n  for (int i = 0; i < 3; i++) {\n    if (i) {\n      while (0) {\n      }\n    }\n  }\n}\n", CODE),
    "a line of code in prose": ("To list the files, open a terminal and type `ls -l`. The first column shows who may read them; the last "
                                "one is the name.\n\nThat is enough for today.\n\nTry it in a folder of your own first.", Expected()),
    "json": ('{"name": "Ann", "tags": ["a", "b"], "size": {"width": 3, "height": 4}}', CODE),
    "thought": ("<think>Three and four make seven, and twice that is fourteen.</think>\nThe answer is 14.", THOUGHT),
    "steps": ("First, 12 boxes hold 6 eggs each, so there are 12 × 6 = 72 eggs. Then 10 break: 72 − 10 = 62.\n#### 62", NUMBERS),
    "dates": ("The bridge was begun in 1871, finished in 1874 and rebuilt after the flood of 1903; since 1960 it carries no trains.",
              Expected()),
    "recipe": ("Melt 50 g of butter, stir in 50 g of flour, add 500 ml of milk little by little, and let it simmer for 10 minutes. Season "
               "with salt, pepper and nutmeg.", Expected()),
    "greek letters": ("The angle α is half of β, and γ follows from both: in a triangle α, β and γ add up to a straight line.", Expected()),
    "french": ("L'été dernier, nous avons traversé la forêt à pied; il faisait très chaud, mais le chemin était à l'ombre.", Expected()),
    "russian, asked for": ("Мы пришли к реке ещё до рассвета и долго смотрели на туман.", Expected(script="CYRILLIC")),
    "cleaned transcript": ("So we moved the meeting to Tuesday, because Mark is away until then. The budget stays as it was.", Expected()),
    "emoji": ("Well done! 🎉🎉🎉 See you tomorrow 👋", Expected()),
    "chorus": ("\n".join(["Row on, row on,", "the night is long,"] * 2 + ["and we are far from shore."] +
                         ["Row on, row on,", "the tide is strong,"] * 2 + ["and who will close the door?"]), Expected()),
    "numbered steps": ("\n".join(f"{n}. {what}" for n, what in enumerate(
        ("Fill the kettle", "Warm the pot", "Add the leaves", "Pour the water", "Wait a while", "Strain it", "Drink"), 1)), Expected()),
    "spelling": ("It is spelled M-I-S-S-I-S-S-I-P-P-I.", Expected()),
    "cap allowed": (PARAGRAPH[:200], Expected(ends=False)),
}

DEGENERATE = {
    "one word": ("The answer is " + "the " * 60, "length", Expected(), "repetition"),
    "a phrase": ("I think that " + "I am sure of it. " * 12, "length", Expected(), "repetition"),
    "a sentence, ended": ("The meeting is on Tuesday. " * 7, "stop", Expected(), "repetition"),
    "a paragraph": (PARAGRAPH + "\n" + (PARAGRAPH + "\n") * 3, "length", Expected(), "repetition"),
    "a cut-off copy": ("Yes. " + "We will see what comes of it in the end. " * 6 + "We will see what", "length", Expected(), "repetition"),
    "letters": ("The word is hahahahahahahahahahahahahahahahahahahahahahahahahahahahahahahaha", "length", Expected(), "repetition"),
    "one letter": ("Wait" + "a" * 200, "length", Expected(), "repetition"),
    "two that alternate": (" ".join(["yes no"] * 30), "length", Expected(), "repetition"),
    "shuffled loops": (" ".join((["the old man went to the sea", "the old man came from the sea"] * 40)[i] for i in
                                (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0)), "length", Expected(), "repetition"),
    "counting": (" ".join(f"Step {n}: add {n} to the total." for n in range(1, 40)), "length", NUMBERS, "repetition"),
    "lines of code": ("x = x + 1\n" * 30, "length", CODE, "repetition"),
    "zeros for ever": ("0 " * 300, "length", NUMBERS, "repetition"),
    "empty": ("", "stop", Expected(), "empty"),
    "spaces": (" \n\n\t ", "stop", Expected(), "empty"),
    "tags alone": ("<think></think>", "stop", THOUGHT, "empty"),
    "no tags": ("The answer is 14.", "stop", THOUGHT, "missing tags"),
    "unclosed tag": ("<think>Three and four make seven, so", "stop", THOUGHT, "missing tags"),
    "chinese": ("今天天气很好,我们一起去公园散步吧", "stop", Expected(), "wrong script"),
    "cyrillic": ("Мы пришли к реке ещё до рассвета и долго смотрели на туман.", "stop", Expected(), "wrong script"),
    "mixed": ("Das ありがとう мир 세계 שלום θάλασσα नमस्ते", "stop", Expected(), "wrong script"),
    "code": ("import os\n\ndef main():\n    return os.getcwd()\n\nprint(main())", "stop", Expected(), "code for prose"),
    "javascript": ("const a = 1;\nlet b = a + 2;\nfunction f() {\n  return b;\n}", "stop", Expected(), "code for prose"),
    "arithmetic": ("12 + 7 = 19 19 * 3 = 57 57 - 4 = 53 #### 53", "stop", Expected(), "numbers for prose"),
    "broken bytes": ("The r\ufffdver \ufffd\ufffd runs \ufffd past the m\ufffdll", "stop", Expected(), "garbled"),
    "control characters": ("Go \x00\x01\x02 on \x03\x04 then", "stop", Expected(), "garbled"),
    "cap": (PARAGRAPH[:150], "length", Expected(), "cap"),
}
