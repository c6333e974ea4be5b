"""The house rules, checked with `ast`: each rule is a function from the repository to the faults it finds.

The rules check properties that the linters of pyproject.toml miss, or check only until somebody writes `noqa`. They
check imports between packages, sizes, broad `except`, units in names, error messages, and files that belong together.
ruff checks docstrings (D1). The rules do NOT judge whether a name or a message is good.

`test_house_rules.py` tests them, and that every rule can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

# A module imports modules of the lines above its own, and of its own package.
LAYERS = (
    {"errors"},
    {"records"},
    {"device"},
    {"files", "processes"},
    {"data", "report", "distributed"},
    {"embeddings", "weights"},
    {"models"},
    {"memory"},
    {"techniques"},
    {"step"},
    {"inference"},
    {"planning"},
    {"training"},
    {"compression"},
    {"diagnose", "integrations"},
    {"cli"},
    {"__init__"},
    {"__main__"},
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

# These take seconds to load. Code that reads records on any machine, even without them, never imports them.
HEAVY = {"torch", "transformers", "tokenizers"}
TORCH_FREE = {"records", "errors", "report"}

# A folder in which every module (except `_x.py`) is one entry, and the folder of the entries' pages.
PAGES = {
    "data/formats": "docs/formats",
    "embeddings/formats": "docs/embeddings",
    "weights/loading/formats": "docs/weights",
    "compression/methods": "docs/shrink",
    "techniques": "docs/techniques",
    "diagnose/causes": "docs/causes",
    "diagnose/lint": "docs/rules",
}

# Names of techniques that are also words with other meanings, and these meanings. For the technique they are a fault.
OTHER_MEANINGS = {
    "autocast": "a function of torch",
    "by_length": "an order of samples (data.order)",
    "cache": "a command, and a folder",
    "evaluation": "a phase of a training",
    "micro_batch": "an argument of a step, and a field of what it says",
}

# Modules without tests of their own, and why.
UNTESTED = {"src/plimsoll/__main__.py": "one call of the command line, which has its tests"}

# Size is a matter of judgement: the first limit is for files that have surely become two.
MAX_FILE_LINES, MAX_FUNCTION_LINES, MOST_FUNCTIONS_LINES, HALF_OF_FUNCTIONS_LINES = 800, 60, 40, 10
MAX_MODULES = 30
IN_ROOT = {"__main__", "errors"}

# A number whose name has one of these words ...
QUANTITIES = {
    "age", "budget", "capacity", "delay", "duration", "elapsed", "headroom", "interval", "latency", "limit", "memory",
    "peak", "period", "size", "time", "timeout",
}  # fmt: skip
# ... ends in one of these, which name the counted unit, ...
UNITS = {
    "bits", "bytes", "count", "documents", "epochs", "factor", "lines", "pixels", "row", "rows", "samples",
    "second", "seconds", "share", "steps", "tokens", "units",
}  # fmt: skip
# ... or in a word of the field: all of these are counts, of samples, vocabulary entries, features and processes.
COUNTS = {"batch_size", "vocab_size", "hidden_size", "embedding_size", "world_size"}

# The remedy: a clause that begins with one of these verbs, or text to type.
REMEDY = re.compile(
    r"[:;,.(]\s*(?:please |first )?(?:add|allow|ask|call|change|check|choose|close|convert|correct|create|delete|"
    r"download|drop|exclude|export|free|give|go on|increase|install|keep|leave|load|lower|make|move|name|open|pass|"
    r"pick|point|prepare|put|quote|raise|reduce|reload|remove|rename|repair|replace|restart|restore|resume|return|run|"
    r"save|see|select|set|shorten|split|start|stop|switch|train|try|turn|update|upgrade|use|wait|write)\b"
    r"|\b(?:give|run|set|try|use|write) `|\bdid you mean\b|\bknown here\b"
)

# Parts of README.md that a script writes, or that are not prose: parts of results, comments, code, link targets.
WRITTEN_BY_SCRIPTS = re.compile(r"<!-- table .*?<!-- /table -->", re.DOTALL)
SESSION = re.compile(r"^```\w*\n(?:(?!^```).*\n)*?\$ (?=.*\n(?!\$ |```))", re.MULTILINE)  # a command and its output
NO_PROSE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\n]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
# Names with digits. All other digits, and these words, count as measured values.
NAMES_WITH_DIGITS = re.compile(r"\b(?:Python 3\.\d+|GPT-2|FSDP2|Apache-2\.0|int[48]|b?float\d+|word2vec)\b")
MEASURED = re.compile(r"\d|\b(?:half|third|quarter|percent|twice (?:as|the)|times (?:as|less|more|faster|slower))\b")
HOST_PATH = re.compile(r"(?<![\w.*~-])/(?:work|tmp|root|home|Users)/[\w.-]")


# Words of the former private dialect, and the field's words for them. Words with other meanings here are left out. They
# are mix (of samples, rows), look, opening (of a file), subject (of a report), way, early, held (out), store (of
# tokens), piece (of a word, of an update), room, spare and together.
DIALECT = {
    **dict.fromkeys(("rung", "rungs"), "fallback"),
    **dict.fromkeys(("ladder", "ladders"), "fallback schedule"),
    **dict.fromkeys(("menu", "menus"), "choices"),
    **dict.fromkeys(("mixes",), "combinations"),
    **dict.fromkeys(("openings",), "lossy alternatives"),
    **dict.fromkeys(("wish", "wishes", "wished"), "constraint"),
    **dict.fromkeys(("lane", "lanes"), "stream slot"),
    **dict.fromkeys(("rehearse", "rehearsed", "rehearses", "rehearsal", "rehearsals"), "dry run"),
    **dict.fromkeys(("taught",), "teacher cache"),
    **dict.fromkeys(("worn",), "fragmented heap"),
}
FORMER_NAMES = {("src/plimsoll/step/result.py", "rung"), ("src/plimsoll/step/train_step.py", "rung")}  # they warn


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def module(self) -> str:
        """The dotted name below `src`: ``plimsoll.data`` for ``src/plimsoll/data/__init__.py``."""
        return ".".join(PurePosixPath(self.path).with_suffix("").parts[1:]).removesuffix(".__init__")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


@dataclass(frozen=True)
class Repository:
    """Texts by path from the root."""

    files: dict[str, str]

    def sources(self, folder: str) -> list[Source]:
        return [Source(path, text) for path, text in self.files.items() if re.match(rf"{folder}/.*\.py$", path)]

    @cached_property
    def package(self) -> list[Source]:
        return self.sources("src/plimsoll")


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to, as named in `LAYERS`."""
    return [*module.split("."), "__init__"][1]


def imports_of(source: Source, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield lines and modules of all imports, also inside functions; our modules are named as in `modules`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules or base == "plimsoll" else base


def imports_point_down(repository: Repository) -> Iterator[str]:
    modules = {source.module for source in repository.package}
    for source in repository.package:
        part = part_of(source.module)
        if part not in RANKS:
            yield f"{source.path}: {part} is in no layer of LAYERS"
            continue
        for line, target in imports_of(source, modules):
            ours = target.split(".")[0] == "plimsoll"
            other = part_of(target) if ours and part_of(target) in RANKS else "__init__"
            if target.startswith("."):
                yield f"{source.path}:{line}: a relative import: write the whole name"
            elif ours and other != part and RANKS[other] >= RANKS[part]:
                yield f"{source.path}:{line}: {part} imports {target}, which is not in a layer below it"


def packages_are_small(repository: Repository) -> Iterator[str]:
    """The root has no loose modules, and each package has few modules."""
    modules: dict[str, list[str]] = {}
    for source in repository.package:
        path = PurePosixPath(source.path)
        if path.stem != "__init__":
            modules.setdefault(path.parent.as_posix(), []).append(path.stem)
    for package, names in modules.items():
        if len(names) > MAX_MODULES:
            yield f"{package} has {len(names)} modules side by side, more than {MAX_MODULES}: make packages of them"
    for name in set(modules.get("src/plimsoll", ())) - IN_ROOT:
        yield f"src/plimsoll/{name}.py lies loose in the root: move it into a package"


def underscored_modules_are_private(repository: Repository) -> Iterator[str]:
    modules = {source.module for source in repository.package}
    for source in repository.package:
        home = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
        for line, target in imports_of(source, modules):
            package, _, name = target.rpartition(".")
            if target in modules and name.startswith("_") and package != home:
                yield f"{source.path}:{line}: {target} is private to {package}"


def names_are_words_of_the_field(repository: Repository) -> Iterator[str]:
    """No file, class, function, argument or variable has a name from the former private dialect."""
    names = {(path, 1, PurePosixPath(path).stem) for path in repository.files}
    any_word = re.compile("|".join(DIALECT), re.IGNORECASE)
    for source in (
        source for folder in ("src/plimsoll", "tests", "benchmarks") for source in repository.sources(folder)
    ):
        if any_word.search(source.text):  # few do, and parsing all files takes seconds
            names.update((source.path, line, name) for line, name in names_given(source))
    for path, line, name in sorted(names):
        for word in sorted(words_of(name) & DIALECT.keys()):
            if (path, name) not in FORMER_NAMES:
                yield f"{path}:{line}: {name}: say {DIALECT[word]} (docs/architecture.md, glossary)"


def names_given(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the names of classes, functions, arguments, fields and variables at their definitions."""
    for node in source.nodes:
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake or camel case, or of a file name."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def no_import_cycle(repository: Repository) -> Iterator[str]:
    modules = {source.module for source in repository.package}
    graph = {source.module: {target for _, target in imports_of(source, modules)} for source in repository.package}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "modules import each other: " + " <- ".join(error.args[1])


def torch_free_parts_stay_so(repository: Repository) -> Iterator[str]:
    for source in repository.package:
        for line, target in imports_of(source, set()):
            if part_of(source.module) in TORCH_FREE and target.split(".")[0] in HEAVY:
                yield f"{source.path}:{line}: {part_of(source.module)} imports {target}"


def num_lines(function: Function) -> int:
    """Return the number of lines of the body, without the signature and the docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def functions_and_files_are_short(repository: Repository) -> Iterator[str]:
    for source in [*repository.package, *repository.sources("tests")]:
        if (lines := source.text.count("\n")) > MAX_FILE_LINES:
            yield f"{source.path} has {lines} lines, more than {MAX_FILE_LINES}"
    lengths = sorted(num_lines(function) for source in repository.package for function in source.functions)
    for share, limit in ((0.5, HALF_OF_FUNCTIONS_LINES), (0.9, MOST_FUNCTIONS_LINES)):
        if lengths and (length := lengths[int(share * (len(lengths) - 1))]) > limit:
            yield f"{share:.0%} of the functions have up to {length} lines, more than {limit}"
    for source in repository.package:
        for function in source.functions:
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            reason = re.match(r"\s*# long: \S", "\n".join(source.text.splitlines()[first - 2 : first - 1]))
            if num_lines(function) > MAX_FUNCTION_LINES and not reason:
                yield (
                    f"{source.path}:{function.lineno}: {function.name} has {num_lines(function)} lines, more than "
                    f"{MAX_FUNCTION_LINES}, and no line `# long: <reason>` above it"
                )


def no_global_and_no_broad_except(repository: Repository) -> Iterator[str]:
    for source in repository.package:
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"
            if source.path != "src/plimsoll/step/oom_boundary.py" and (caught := broadly_caught(node)):
                yield f"{source.path}:{node.lineno}: catches {caught}"


def broadly_caught(node: ast.AST) -> str | None:
    """Return the exception of an ``except`` or ``suppress(...)`` that catches everything, or None."""
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        return "everything"
    if isinstance(node, ast.ExceptHandler):
        caught: list[ast.expr] = [node.type]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        caught = node.args
    else:
        return None
    broad = [name for expression in caught for name in names_in(expression) & {"Exception", "BaseException"}]
    return broad[0] if broad else None


def every_module_has_its_tests(repository: Repository) -> Iterator[str]:
    for source in repository.package:
        names = source.module.split(".")
        folder = PurePosixPath("tests/unit", *PurePosixPath(source.path).parent.parts[2:])
        accepted = [f"{folder}/test_{'_'.join(names[start:])}.py" for start in range(len(names))]
        is_tested = source.path in UNTESTED or any(path in repository.files for path in accepted)
        if has_code(source.tree) and not is_tested:
            yield f"{source.path} has no tests: write {' or '.join(accepted[1:] or accepted)}"


def has_code(tree: ast.Module) -> bool:
    """Return whether a module has more than a docstring and imported names."""
    return any(not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in tree.body)


def quantities_carry_their_unit(repository: Repository) -> Iterator[str]:
    for source in repository.package:
        for line, name, annotation in numbers(source.tree):
            *_, last = words = name.removesuffix("_of").split("_")
            is_counted = last in UNITS or "_".join(words[-2:]) in COUNTS or words[0] == "num"
            is_number = annotation is not None and re.fullmatch(r"(int|float)( \| None)?", ast.unparse(annotation))
            if is_number and QUANTITIES.intersection(words) and not is_counted:
                yield f"{source.path}:{line}: {name}: {ast.unparse(annotation)} does not say its unit, such as _bytes"


def numbers(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr | None]]:
    """Yield parameters, annotated variables and fields, and functions with their return types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield node.lineno, ast.unparse(node.target).rpartition(".")[2], node.annotation
        elif isinstance(node, Function):
            yield node.lineno, node.name, node.returns


def errors_say_the_value_and_the_remedy(repository: Repository) -> Iterator[str]:
    everywhere = [function for source in repository.package for function in source.functions]
    for source in repository.package:
        ours = names_from("plimsoll.errors", source)
        imported = names_from("plimsoll", source)
        functions = [*source.functions, *(f for f in everywhere if f.name in imported)]
        passed_on = messages_passed_on(source, ours)
        for call in source.nodes:
            if not (isinstance(call, ast.Call) and call.args and dotted(call.func) in ours):
                continue
            text = message_text(call.args[0], source, functions)
            if "{}" not in text:
                yield f"{source.path}:{call.lineno}: the message holds no value: {text}"
            if not REMEDY.search(text) and id(call) not in passed_on:
                yield f"{source.path}:{call.lineno}: the message does not say what to do: {text}"


def names_from(package: str, source: Source) -> set[str]:
    froms = [node for node in source.nodes if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in froms if f"{node.module}.".startswith(f"{package}.") for alias in node.names}


def messages_passed_on(source: Source, ours: set[str]) -> set[int]:
    """Return the calls inside ``except <our error> as error`` that repeat ``error``, and with it the remedy."""
    return {
        id(call)
        for handler in source.nodes
        if isinstance(handler, ast.ExceptHandler) and handler.type and dotted(handler.type) in ours
        for call in ast.walk(handler)
        if isinstance(call, ast.Call) and handler.name in names_in(call)
    }


def message_text(message: ast.expr, source: Source, functions: list[Function]) -> str:
    """Return the text of a message with ``{}`` for values, and the texts of the variables and functions in it."""
    assignments = [node for node in source.nodes if isinstance(node, ast.Assign)]
    parts: list[ast.AST] = [message]
    names = names_in(message)
    parts += [node.value for node in assignments if names & set(map(dotted, node.targets))]
    for part in parts:  # the list grows during the loop
        names = names_in(part)
        parts += [function for function in functions if function.name in names and function not in parts]
    return " ".join(piece for part in parts for piece in literals(part))


def dotted(node: ast.AST) -> str:
    """Return the source of a dotted name, or "" for other nodes; `ast.unparse` is slow."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def literals(node: ast.AST) -> Iterator[str]:
    """Yield the text constants below a node; an expression statement is a docstring, which users do not see."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
    elif not isinstance(node, ast.Expr):
        for child in ast.iter_child_nodes(node):
            yield from literals(child)


def every_entry_has_its_page(repository: Repository) -> Iterator[str]:
    for source in repository.package:
        path = PurePosixPath(source.path)
        folder = PAGES.get("/".join(path.parent.parts[2:]))
        if folder and not path.name.startswith("_") and f"{folder}/{path.stem}.md" not in repository.files:
            yield f"{source.path} has no page {folder}/{path.stem}.md"


def no_test_is_skipped_without_a_reason(repository: Repository) -> Iterator[str]:
    for source in repository.sources("tests"):
        if not re.search(r"\.(skip|xfail)", source.text):
            continue  # most files: parsing all of them takes seconds
        calls = {id(node.func): node for node in source.nodes if isinstance(node, ast.Call)}
        for node in source.nodes:
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if not re.fullmatch(r"pytest(\.mark)?\.(skip|skipif|xfail)", name):
                continue
            call = calls.get(id(node), ast.Call(node, [], []))
            in_words = any(keyword.arg == "reason" for keyword in call.keywords)
            takes_condition = name in ("pytest.mark.skipif", "pytest.mark.xfail")
            if not in_words and (takes_condition or not call.args):
                yield f"{source.path}:{node.lineno}: {name} without a reason"


def no_path_of_one_machine(repository: Repository) -> Iterator[str]:
    for path, text in repository.files.items():
        if not path.startswith("tests/"):
            for number, line in enumerate(text.splitlines(), start=1):
                if found := HOST_PATH.search(line):
                    yield f"{path}:{number}: {found[0]}... is a path of one machine"


def readme_has_no_number_that_no_script_writes(repository: Repository) -> Iterator[str]:
    """All numbers are between `<!-- table NAME -->` and `<!-- /table -->`; `benchmarks/readme.py` writes them."""
    text = without(WRITTEN_BY_SCRIPTS, repository.files.get("README.md", ""))
    for found in SESSION.finditer(text):
        yield f"README.md:{line_of(text, found.end())}: a session with what it prints, which no script writes"
    for number, line in enumerate(without(NAMES_WITH_DIGITS, without(NO_PROSE, text)).splitlines(), start=1):
        if found := MEASURED.search(line):
            yield f"README.md:{number}: {found[0]!r} is no part of a result: {line.strip()[:80]}"


def without(pattern: re.Pattern[str], text: str) -> str:
    """Remove the matches of a pattern from a text, and keep its number of lines."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def line_of(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def techniques_are_known_by_themselves(repository: Repository) -> Iterator[str]:
    """Only a technique's own file contains its name as text; other code reads its fields, or uses ``<Class>.name``."""
    folder = "src/plimsoll/techniques/"
    files = [source.path for source in repository.package if re.fullmatch(rf"{folder}[a-z]\w*\.py", source.path)]
    names = {PurePosixPath(path).stem: path for path in files}
    for source in repository.package:
        found = [node for node in source.nodes if isinstance(node, ast.Constant) and node.value in names]
        meant = {id(node) for other in source.nodes if found for node in meant_as_techniques(other, set(names))}
        for node in found:
            if names[node.value] != source.path and (node.value not in OTHER_MEANINGS or id(node) in meant):
                yield (
                    f"{source.path}:{node.lineno}: knows the technique {node.value!r} by its name: ask a field of "
                    f"`Technique`, or use the name of its class"
                )


def meant_as_techniques(node: ast.AST, names: set[str]) -> list[ast.Constant]:
    """Return the texts in a node that it uses as techniques: compared with one, passed as one, or among several."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        is_meant = any(dotted(side).split(".")[-1] == "technique" for side in sides)
        parts = [part for side in sides for part in [side, *getattr(side, "elts", ())]] if is_meant else []
    elif isinstance(node, ast.keyword):
        parts = [node.value] if node.arg == "technique" else []
    elif isinstance(node, ast.Call):
        parts = node.args if dotted(node.func).split(".")[-1] in {"technique_of", "require_technique"} else []
    elif isinstance(node, ast.Subscript):
        parts = [node.slice] if dotted(node.value).split(".")[-1] == "TECHNIQUES" else []
    elif isinstance(node, ast.Dict | ast.Set | ast.Tuple | ast.List):
        parts = node.keys if isinstance(node, ast.Dict) else node.elts
        parts = parts if len({part.value for part in constants(parts)} & names) > 1 else []
    else:
        parts = []
    return constants(parts)


def constants(nodes: Iterable[ast.AST | None]) -> list[ast.Constant]:
    return [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


Rule = Callable[[Repository], Iterator[str]]
RULES: tuple[Rule, ...] = (
    imports_point_down,
    packages_are_small,
    underscored_modules_are_private,
    names_are_words_of_the_field,
    no_import_cycle,
    torch_free_parts_stay_so,
    functions_and_files_are_short,
    no_global_and_no_broad_except,
    every_module_has_its_tests,
    quantities_carry_their_unit,
    errors_say_the_value_and_the_remedy,
    every_entry_has_its_page,
    no_test_is_skipped_without_a_reason,
    no_path_of_one_machine,
    readme_has_no_number_that_no_script_writes,
    techniques_are_known_by_themselves,
)
