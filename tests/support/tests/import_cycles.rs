//! Files of a crate that import each other, directly or through other files, form a cycle: none of them can be
//! understood, moved or changed alone. This test measures the cycles of every crate and limits their size. See
//! docs/decisions/0102.
//!
//! An import is every path of a file that names an item of another file of its crate, in a `use` or elsewhere. A
//! re-export counts as an import of the file that defines the item, and so does every use of the re-export. Unit tests do
//! not count: they may use everything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The maximum number of files in a cycle.
const MAX_CYCLE: usize = 6;

const TEST_ATTRIBUTE: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];

/// The sources of a crate: its files by module path. The root is the empty path.
struct Crate {
    modules: BTreeMap<Vec<String>, Source>,
    /// The macros, which are all at the root, and the modules that define them.
    macros: BTreeMap<String, Vec<String>>,
}

/// The imports of every file of a crate.
type AllImports<'a> = BTreeMap<&'a Vec<String>, Imports<'a>>;

/// The imported modules, and the items of each.
type Imports<'a> = BTreeMap<&'a Vec<String>, BTreeSet<String>>;

struct Source {
    file: PathBuf,
    tokens: Vec<String>,
    /// The paths of the `use` declarations by the name that they bring into scope.
    uses: Vec<(String, Vec<String>)>,
}

impl Crate {
    fn read(folder: &Path) -> Self {
        let mut files = Vec::new();
        find_sources(folder, &mut files);
        let mut new = Self { modules: BTreeMap::new(), macros: BTreeMap::new() };
        let mut test_modules = Vec::new();
        for file in files {
            let relative = file.strip_prefix(folder).expect("a file of the folder");
            let mut path: Vec<String> =
                relative.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
            if matches!(path.last().map(String::as_str), Some("lib" | "main" | "mod")) {
                path.pop();
            }
            let text = std::fs::read_to_string(&file).expect("a readable file");
            let (tokens, tests) = without_tests(&tokens(&text));
            let tokens = with_flat_modules(tokens);
            test_modules.extend(tests.into_iter().map(|name| [path.as_slice(), &[name]].concat()));
            let uses = used_paths(&tokens);
            new.modules.insert(path, Source { file: relative.to_owned(), tokens, uses });
        }
        new.modules.retain(|module, _| !test_modules.iter().any(|tests| module.starts_with(tests)));
        for (path, source) in &new.modules {
            for window in source.tokens.windows(3).filter(|window| window[0] == "macro_rules") {
                new.macros.insert(window[2].clone(), path.clone());
            }
        }
        new
    }

    /// Returns the imports of each file: the modules and the first path that names each of them.
    fn imports(&self) -> AllImports<'_> {
        self.modules.iter().map(|(path, source)| (path, self.imports_of(path, source))).collect()
    }

    /// Returns the cycles of files.
    fn cycles(&self, imports: &AllImports<'_>) -> Vec<Cycle> {
        let names: Vec<_> = imports.keys().copied().collect();
        let numbers = |targets: &Imports<'_>| {
            targets.keys().map(|target| names.binary_search(target).expect("a file")).collect()
        };
        let edges = imports.values().map(numbers).enumerate().collect();
        let describe = |cycle: &Vec<usize>| {
            let mut lines = Vec::new();
            for from in cycle.iter().map(|from| names[*from]) {
                for to in cycle.iter().map(|to| names[*to]) {
                    let Some(items) = imports[from].get(to) else { continue };
                    let (from, to) = (self.modules[from].file.display(), self.modules[to].file.display());
                    lines.push(format!("  {from} imports {items:?} of {to}"));
                }
            }
            Cycle { len: cycle.len(), imports: lines }
        };
        cycles(&edges).iter().map(describe).collect()
    }

    /// Returns the sets of folders of the crate that import each other, directly or through files beside them.
    fn folder_cycles(&self, imports: &AllImports<'_>) -> Vec<Vec<&String>> {
        let names: Vec<_> = self
            .modules
            .keys()
            .filter_map(|path| path.first())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        let number = |path: &[String]| path.first().and_then(|name| names.binary_search(&name).ok());
        let mut edges: BTreeMap<usize, BTreeSet<usize>> =
            (0..names.len()).map(|name| (name, BTreeSet::new())).collect();
        for (path, imports) in imports {
            // The root only re-exports.
            let Some(from) = number(path) else { continue };
            let targets = imports.keys().filter_map(|target| number(target)).filter(|target| *target != from);
            edges.entry(from).or_default().extend(targets);
        }
        let is_folder = |name: &String| self.modules.keys().any(|path| path.len() > 1 && path[0] == *name);
        let folders = cycles(&edges).into_iter().map(|cycle| {
            cycle.into_iter().map(|name| names[name]).filter(|name| is_folder(name)).collect::<Vec<_>>()
        });
        folders.filter(|folders| folders.len() > 1).collect()
    }

    fn imports_of(&self, own: &[String], source: &Source) -> Imports<'_> {
        let used = source.uses.iter().map(|(_, path)| path.as_slice());
        let inline = inline_paths(&source.tokens);
        let mut found = Imports::new();
        for path in used.chain(inline.iter().map(Vec::as_slice)) {
            let Some(target) = self.absolute(own, path) else { continue };
            // A module that is only brought into scope is not yet an import of an item of it.
            if let Some((module, item)) = self.definition(&target)
                && *module != own
            {
                found.entry(module).or_default().insert(item);
            }
        }
        found
    }

    /// Returns the module that defines an item, and the item.
    fn definition(&self, target: &[String]) -> Option<(&Vec<String>, String)> {
        let mut target = target.to_vec();
        // Re-exports do not form long chains.
        for _ in 0..8 {
            if let [name] = target.as_slice()
                && let Some(module) = self.macros.get(name)
            {
                return Some((module, name.clone()));
            }
            let (module, source) = (0..=target.len())
                .rev()
                .find_map(|length| self.modules.get_key_value(&target[..length]))
                .expect("the root contains every path");
            let (item, after) = target[module.len()..].split_first()?;
            let reexport = source.uses.iter().find(|(name, _)| name == item);
            match reexport.and_then(|(_, path)| self.absolute(module, path)) {
                Some(path) if path != target => target = [path.as_slice(), after].concat(),
                _ => return Some((module, item.clone())),
            }
        }
        None
    }

    /// Returns a path from the root of the crate, or nothing for a path into another crate.
    fn absolute(&self, own: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut base = own.to_vec();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {}
            name => {
                let is_child = self.modules.contains_key(&[own, &[name.to_owned()]].concat());
                let imported = self.modules.get(own).and_then(|source| {
                    source.uses.iter().find(|(alias, used)| alias == name && used.as_slice() != path)
                });
                if let Some((_, used)) = imported {
                    base = self.absolute(own, used)?;
                    rest = &rest[1..];
                } else if !is_child {
                    return None;
                }
            }
        }
        while rest.first().is_some_and(|name| name == "super") {
            base.pop();
            rest = &rest[1..];
        }
        base.extend(rest.iter().filter(|name| *name != "self").cloned());
        Some(base)
    }
}

fn find_sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            find_sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Splits Rust source into identifiers and punctuation, without comments and literals.
fn tokens(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = raw_string(rest) {
            length
        } else if first == '"' {
            quoted(rest, '"')
        } else if first == '\'' {
            character(rest)
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            found.push(rest[..length].to_owned());
            length
        } else if rest.starts_with("::") {
            found.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() && first != '$' {
                found.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    found
}

fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let content = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text.len() - content.len() + content.find(&end)? + end.len())
}

/// Returns the length of a literal in quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (index, c) in text.char_indices().skip(1) {
        if c == quote && !escaped {
            return index + c.len_utf8();
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

/// Returns the length of a character, or of the quote that begins a lifetime.
fn character(text: &str) -> usize {
    let second = text.chars().nth(1);
    if second == Some('\\') || text.chars().nth(2) == Some('\'') { quoted(text, '\'') } else { 1 }
}

/// Removes the items that exist only in tests, and returns the names of modules in files of their own among them.
fn without_tests(tokens: &[String]) -> (Vec<String>, Vec<String>) {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut test_modules = Vec::new();
    let mut rest = tokens;
    while let Some(first) = rest.first() {
        if rest.len() > TEST_ATTRIBUTE.len() && rest[..TEST_ATTRIBUTE.len()] == TEST_ATTRIBUTE {
            let (item, after) = rest.split_at(item_length(rest));
            if let [.., keyword, name, end] = item
                && keyword == "mod"
                && end == ";"
            {
                test_modules.push(name.clone());
            }
            rest = after;
        } else {
            kept.push(first.clone());
            rest = &rest[1..];
        }
    }
    (kept, test_modules)
}

/// Returns the number of tokens of the first item, which ends with a semicolon or a block.
fn item_length(tokens: &[String]) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 && matches!(token.as_str(), ";" | "}") {
            return index + 1;
        }
    }
    tokens.len()
}

/// Replaces `super` by `self` where it leads from a module in braces to the file.
fn with_flat_modules(mut tokens: Vec<String>) -> Vec<String> {
    // Whether each open brace is that of a module.
    let mut braces: Vec<bool> = Vec::new();
    for index in 0..tokens.len() {
        match tokens[index].as_str() {
            "{" => braces.push(index >= 2 && tokens[index - 2] == "mod"),
            "}" => {
                braces.pop();
            }
            "super" => {
                let earlier = tokens[..index].rchunks(2);
                let before = earlier
                    .take_while(|pair| matches!(pair, [name, colons] if name == "self" && colons == "::"))
                    .count();
                if before < braces.iter().filter(|is_module| **is_module).count() {
                    tokens[index] = "self".to_owned();
                }
            }
            _ => {}
        }
    }
    tokens
}

/// Returns the paths of all `use` declarations, with the names that they bring into scope.
fn used_paths(tokens: &[String]) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        if tokens[index] == "use" {
            let end = index + tokens[index..].iter().position(|token| token == ";").unwrap_or(1);
            expand_use(&tokens[index + 1..end], &[], &mut found);
            index = end;
        }
        index += 1;
    }
    found
}

/// Expands a tree such as `a::{b, c as d}`.
fn expand_use(tree: &[String], prefix: &[String], found: &mut Vec<(String, Vec<String>)>) {
    let mut path = prefix.to_vec();
    for (index, token) in tree.iter().enumerate() {
        match token.as_str() {
            "::" => {}
            "{" => {
                for branch in branches(&tree[index..]) {
                    expand_use(branch, &path, found);
                }
                return;
            }
            "as" => {
                found.push((tree[index + 1].clone(), path));
                return;
            }
            name => path.push(name.to_owned()),
        }
    }
    let name = path.iter().rev().find(|name| *name != "self").cloned().unwrap_or_default();
    found.push((name, path));
}

/// Splits a list in braces at its outer commas.
fn branches(list: &[String]) -> Vec<&[String]> {
    let mut found = Vec::new();
    let mut depth = 0;
    let mut start = 1;
    for (index, token) in list.iter().enumerate() {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 || (token == "," && depth == 1) {
            if start < index {
                found.push(&list[start..index]);
            }
            start = index + 1;
        }
    }
    found
}

/// Returns the paths with at least two segments outside of `use` declarations.
fn inline_paths(tokens: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        if tokens[index] == "use" {
            index += tokens[index..].iter().position(|token| token == ";").unwrap_or(1);
            continue;
        }
        let starts = is_name(&tokens[index]) && (index == 0 || tokens[index - 1] != "::");
        if !starts || tokens.get(index + 1).is_none_or(|next| next != "::") {
            index += 1;
            continue;
        }
        let mut path = vec![tokens[index].clone()];
        while tokens.get(index + 1).is_some_and(|next| next == "::")
            && tokens.get(index + 2).is_some_and(|name| is_name(name))
        {
            path.push(tokens[index + 2].clone());
            index += 2;
        }
        index += 1;
        found.push(path);
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Returns the sets of modules that reach each other, the largest first.
fn cycles(imports: &BTreeMap<usize, BTreeSet<usize>>) -> Vec<Vec<usize>> {
    let reached: BTreeMap<usize, BTreeSet<usize>> =
        imports.keys().map(|start| (*start, reachable(*start, imports))).collect();
    let mut cycles: BTreeSet<Vec<usize>> = BTreeSet::new();
    for (start, reached_from_start) in &reached {
        let cycle: Vec<usize> =
            reached_from_start.iter().copied().filter(|other| reached[other].contains(start)).collect();
        if cycle.len() > 1 {
            cycles.insert(cycle);
        }
    }
    let mut cycles: Vec<_> = cycles.into_iter().collect();
    cycles.sort_by_key(|cycle| std::cmp::Reverse(cycle.len()));
    cycles
}

fn reachable(start: usize, imports: &BTreeMap<usize, BTreeSet<usize>>) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut pending = vec![start];
    while let Some(next) = pending.pop() {
        for target in &imports[&next] {
            if found.insert(*target) {
                pending.push(*target);
            }
        }
    }
    found
}

/// Files that import each other.
struct Cycle {
    len: usize,
    imports: Vec<String>,
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files import each other\n{}", self.len, self.imports.join("\n"))
    }
}

/// Returns the folders of all crates.
fn crates() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the root of the repository");
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).expect("the manifest of the workspace");
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = [")).expect("its members");
    let names = members.trim_end_matches(']').split(',').map(|name| name.trim().trim_matches('"'));
    names.map(|name| root.join(name)).collect()
}

#[test]
fn imports_form_only_small_cycles_within_folders() {
    let mut found = Vec::new();
    for folder in crates() {
        let (sources, name) = (Crate::read(&folder.join("src")), folder.display().to_string());
        let imports = sources.imports();
        let large = sources.cycles(&imports).into_iter().filter(|cycle| cycle.len > MAX_CYCLE);
        found.extend(large.map(|cycle| format!("{name}: {cycle}")));
        let between = sources.folder_cycles(&imports);
        found.extend(between.iter().map(|folders| format!("{name}: folders import each other: {folders:?}")));
    }
    assert!(
        found.is_empty(),
        "at most {MAX_CYCLE} files of a folder may import each other; move an item to a lower file:\n{}",
        found.join("\n")
    );
}

fn write(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary directory");
    for (path, text) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("the folder");
        std::fs::write(path, text).expect("a written file");
    }
    folder
}

/// Measures the cycles of a crate with the given files.
fn measure(files: &[(&str, &str)]) -> Vec<usize> {
    let folder = write(files);
    let sources = Crate::read(folder.path());
    sources.cycles(&sources.imports()).iter().map(|cycle| cycle.len).collect()
}

#[test]
fn follows_imports_to_the_files_that_define_the_items() {
    let cycle = [
        ("lib.rs", "mod a;\nmod b;\npub use b::Item;"),
        ("a.rs", "use crate::Item;\npub(crate) struct Other(Item);"),
        ("b.rs", "pub struct Item;\nfn f() { let _ = \"crate::a::No\"; super::a::Other::new() }"),
    ];
    assert_eq!(measure(&cycle), [2]);
    let without = [cycle[0], cycle[1], ("b.rs", "pub struct Item; // super::a::Other\n")];
    assert!(measure(&without).is_empty());
}

#[test]
fn finds_folders_that_import_each_other() {
    let files = [
        ("lib.rs", "mod a;\nmod b;\nmod between;"),
        ("a/mod.rs", "mod c;\npub struct A;"),
        ("a/c.rs", "use crate::between::f;"),
        ("between.rs", "pub fn f() { crate::b::d::g() }"),
        ("b/mod.rs", "pub mod d;"),
        ("b/d.rs", "pub fn g() { let _ = crate::a::A; }"),
    ];
    let folder = write(&files);
    let sources = Crate::read(folder.path());
    assert_eq!(sources.folder_cycles(&sources.imports()), [["a", "b"]]);
}

#[test]
fn ignores_unit_tests_and_modules_in_braces() {
    let files = [
        ("lib.rs", "mod a;\nmod b;"),
        ("a.rs", "use crate::b::f;\npub fn g() {}\n#[cfg(test)]\nmod tests;"),
        ("a/tests.rs", "use crate::b::f;"),
        (
            "b.rs",
            "use super::c::h;\npub fn f() {}\nmod inner { use super::f; }\n#[cfg(test)]\npub(crate) mod tests { use crate::a::g; }",
        ),
        ("c/mod.rs", "mod d;\npub fn h() {}\nfn i() { d::j() }"),
        ("c/d.rs", "use super::h;\npub fn j() { h() }"),
    ];
    assert_eq!(measure(&files), [2]);
}
