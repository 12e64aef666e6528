//! The objects that files describe.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde_json::{Map, Value};

use super::ownership::MARK;
use super::schema::{Kind, LineError, check_object, unknown};
use super::yaml::{self, Content, Node};
use crate::error_text::io_error_text;
use crate::exit_code::{Outcome, error_with_outcome};
use crate::output::escape_control;

/// The name of standard input.
pub(super) const STDIN: &str = "-";
/// The endings of the files of a directory that are read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
/// The maximum number of errors that are shown.
const MAX_ERRORS: usize = 20;

/// Identifies an object: type, namespace if it has one, and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Identity {
    pub(super) kind: Kind,
    pub(super) namespace: Option<String>,
    /// The URL of an artifact that is fetched.
    pub(super) name: String,
}

impl Identity {
    /// Returns the type and the name, for messages.
    pub(super) fn title(&self) -> String {
        format!("{} {}", self.kind, escape_control(&self.name))
    }
}

/// An object that a file describes.
#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) identity: Identity,
    /// The fields that are given, without `kind`, `name` and `namespace`.
    pub(super) fields: Map<String, Value>,
    /// File and line.
    pub(super) location: String,
    /// The directory that paths are relative to.
    pub(super) directory: PathBuf,
}

impl Declared {
    /// Returns the entries of a field that has entries.
    pub(super) fn entries(&self, field: &str) -> Map<String, Value> {
        match self.fields.get(field) {
            Some(Value::Object(entries)) => entries.clone(),
            Some(Value::Array(names)) => {
                names.iter().filter_map(|name| Some((name.as_str()?.to_owned(), true.into()))).collect()
            }
            _ => Map::new(),
        }
    }

    /// Returns the items of a field that is a list of objects.
    pub(super) fn items(&self, field: &str) -> &[Value] {
        self.fields.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}

/// Reads files, directories and standard input.
pub(super) fn read(paths: &[PathBuf], own_namespace: &str) -> anyhow::Result<Vec<Declared>> {
    let mut reader = Reader { own_namespace, objects: BTreeMap::new(), errors: vec![] };
    for path in paths {
        if path == Path::new(STDIN) {
            let mut text = String::new();
            let read = io::stdin().read_to_string(&mut text);
            read.map_err(|error| unreadable("standard input", &error))?;
            reader.add_file("standard input", Path::new("."), &text);
        } else if path.is_dir() {
            for file in files_of(path)? {
                reader.add_path(&file)?;
            }
        } else {
            reader.add_path(path)?;
        }
    }
    if !reader.errors.is_empty() {
        let count = reader.errors.len();
        let mut text = format!("{count} {}:", if count == 1 { "error" } else { "errors" });
        for error in reader.errors.iter().take(MAX_ERRORS) {
            let _ = write!(text, "\n  {}", escape_control(error));
        }
        if count > MAX_ERRORS {
            let _ = write!(text, "\n  and {} more", count - MAX_ERRORS);
        }
        return Err(error_with_outcome(Outcome::Usage, text));
    }
    Ok(reader.objects.into_values().collect())
}

/// Returns the files of a directory, in the order of their names.
fn files_of(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let shown = directory.display().to_string();
    let entries = fs::read_dir(directory).map_err(|error| unreadable(&shown, &error))?;
    let mut files = vec![];
    for entry in entries {
        let path = entry.map_err(|error| unreadable(&shown, &error))?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_file() && extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            files.push(path);
        }
    }
    if files.is_empty() {
        let text = format!("directory {shown} has no file that ends with .yaml, .yml or .json");
        return Err(error_with_outcome(Outcome::Usage, text));
    }
    files.sort();
    Ok(files)
}

fn unreadable(what: &str, error: &io::Error) -> anyhow::Error {
    anyhow!("cannot read {what}: {}", io_error_text(error))
}

struct Reader<'a> {
    own_namespace: &'a str,
    objects: BTreeMap<Identity, Declared>,
    errors: Vec<String>,
}

impl Reader<'_> {
    fn add_path(&mut self, path: &Path) -> anyhow::Result<()> {
        let shown = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| unreadable(&shown, &error))?;
        self.add_file(&shown, path.parent().unwrap_or(Path::new(".")), &text);
        Ok(())
    }

    fn add_file(&mut self, file: &str, directory: &Path, text: &str) {
        match yaml::parse(text) {
            Ok(documents) => {
                for document in documents {
                    match &document.content {
                        Content::List(items) => {
                            items.iter().for_each(|item| self.add_object(file, directory, item));
                        }
                        _ => self.add_object(file, directory, &document),
                    }
                }
            }
            Err(error) => self.errors.push(format!("{file}:{}: {}", error.line, error.text)),
        }
    }

    fn add_object(&mut self, file: &str, directory: &Path, node: &Node) {
        let mut errors: Vec<LineError> = vec![];
        let identity = self.check(node, &mut errors);
        let failed = !errors.is_empty();
        self.errors.extend(errors.into_iter().map(|(line, text)| format!("{file}:{line}: {text}")));
        let (Some(identity), Value::Object(mut fields)) = (identity.filter(|_| !failed), node.to_json())
        else {
            return;
        };
        for name in ["kind", "name", "namespace"] {
            fields.remove(name);
        }
        let location = format!("{file}:{}", node.line);
        if let Some(first) = self.objects.get(&identity) {
            let title = identity.title();
            self.errors.push(format!("{location}: {title} is already described at {}", first.location));
            return;
        }
        let declared =
            Declared { identity: identity.clone(), fields, location, directory: directory.to_owned() };
        self.objects.insert(identity, declared);
    }

    /// Checks an object and returns which one it is.
    fn check(&self, node: &Node, errors: &mut Vec<LineError>) -> Option<Identity> {
        let Content::Object(fields) = &node.content else {
            errors.push((
                node.line,
                format!("expected an object with the field kind, not {}", node.describe()),
            ));
            return None;
        };
        let find = |name: &str| fields.iter().find(|field| field.name == name).map(|field| &field.value);
        let words: Vec<&str> = Kind::ALL.iter().map(|kind| kind.word()).collect();
        let Some(value) = find("kind") else {
            errors.push((node.line, format!("kind is missing; it is one of {}", words.join(", "))));
            return None;
        };
        let word = value.to_json();
        let word = word.as_str().unwrap_or_default();
        let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.word() == word) else {
            errors.push((value.line, unknown(&format!("kind {word:?}"), word, &words)));
            return None;
        };
        let common: &[&str] =
            if kind.has_namespace() { &["kind", "name", "namespace"] } else { &["kind", "name"] };
        check_object(kind.fields(), common, node, kind.word(), errors);
        let mut text = |name: &str| match find(name).map(|value| (value, value.to_json())) {
            Some((_, Value::String(text))) if !text.is_empty() => Some(text),
            Some((value, _)) => {
                errors.push((value.line, format!("{name} must be a string that is not empty")));
                None
            }
            None => None,
        };
        let (name, namespace) = (text("name"), text("namespace"));
        if let Some(Content::Object(metadata)) = find("metadata").map(|value| &value.content)
            && let Some(field) = metadata.iter().find(|field| field.name == MARK)
        {
            errors.push((field.line, format!("metadata.{MARK} is reserved for muster apply")));
        }
        let name = if kind == Kind::Artifact {
            check_artifact(name, |name| find(name), node.line, errors)?
        } else if let Some(name) = name {
            name
        } else {
            errors.push((node.line, "name is missing".to_owned()));
            return None;
        };
        let namespace =
            kind.has_namespace().then(|| namespace.unwrap_or_else(|| self.own_namespace.to_owned()));
        Some(Identity { kind, namespace, name })
    }
}

/// Checks that an artifact is either fetched or uploaded, and returns its URL or its name.
fn check_artifact<'a>(
    name: Option<String>,
    find: impl Fn(&str) -> Option<&'a Node>,
    line: usize,
    errors: &mut Vec<LineError>,
) -> Option<String> {
    if let Some(value) = find("max_versions")
        && value.to_json() == 0
    {
        errors.push((value.line, "max_versions must be at least 1".to_owned()));
    }
    match (name, find("url"), find("file")) {
        (None, Some(url), None) => {
            if find("artifact_type").is_some() {
                errors.push((url.line, "artifact_type is only for an artifact with file".to_owned()));
            }
            url.to_json().as_str().map(str::to_owned)
        }
        (Some(name), None, Some(_)) => Some(name),
        (Some(_), Some(url), None) => {
            errors.push((url.line, "an artifact with url has no name: the server names it".to_owned()));
            None
        }
        (None, None, Some(_)) => {
            errors.push((line, "name is missing".to_owned()));
            None
        }
        (_, None, None) | (_, Some(_), Some(_)) => {
            errors.push((line, "an artifact has either url, or name and file".to_owned()));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Declared>, String> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        fs::write(&file, text).unwrap();
        let shown = file.display().to_string();
        read(&[directory.path().to_owned()], "ci")
            .map_err(|error| error.to_string().replace(&shown, "a.yaml"))
    }

    #[test]
    fn objects_are_documents_or_items_of_lists() {
        let text = "kind: namespace\nname: ci\n---\n- kind: network\n  name: lan\n  netblock: 10.0.0.0/24\n\
                    - {kind: artifact, url: 'debian:12', namespace: system}\n";
        let objects = read_text(text).unwrap();
        let titles: Vec<String> = objects.iter().map(|object| object.identity.title()).collect();
        assert_eq!(titles, ["namespace ci", "network lan", "artifact debian:12"]);
        assert_eq!(objects[1].identity.namespace.as_deref(), Some("ci"));
        assert!(objects[1].location.ends_with("a.yaml:4"), "{}", objects[1].location);
        assert!(objects[1].fields.len() == 1 && objects[0].fields.is_empty());
    }

    #[test]
    fn errors_name_file_line_and_field() {
        for (text, expected) in [
            (
                "kind: network\nname: lan\nnetblok: x\n",
                "a.yaml:3: field netblok is unknown; did you mean netblock?",
            ),
            ("kind: network\nname: lan\n", "a.yaml:1: netblock is missing"),
            ("kind: netwrk\nname: lan\n", "a.yaml:1: kind \"netwrk\" is unknown; did you mean network?"),
            ("name: lan\n", "a.yaml:1: kind is missing; it is one of namespace, "),
            ("kind: network\nname: lan\nnetblock: 7\n", "a.yaml:3: netblock must be a string"),
            (
                "kind: network\nname: lan\nnetblock: x\nprovide_dns: yes\n",
                "a.yaml:4: provide_dns must be true or false",
            ),
            ("kind: namespace\nname: 7\n", "a.yaml:2: name must be a string"),
            ("kind: namespace\nname: a\nnamespace: b\n", "a.yaml:3: field namespace is unknown"),
            (
                "kind: namespace\nname: a\nquotas:\n  key: 7\n",
                "a.yaml:4: quotas.key is unknown; did you mean keys?",
            ),
            ("kind: namespace\nname: a\nquotas: {keys: -1}\n", "a.yaml:3: quotas.keys must be a number"),
            ("kind: namespace\nname: a\ntrust: b\n", "a.yaml:3: trust must be a list, not a string"),
            (
                "kind: namespace\nname: a\nmetadata: {muster-apply: 1}\n",
                "a.yaml:3: metadata.muster-apply is reserved",
            ),
            ("kind: artifact\nname: a\n", "a.yaml:1: an artifact has either url, or name and file"),
            ("kind: artifact\nname: a\nurl: b\n", "a.yaml:3: an artifact with url has no name"),
            (
                "kind: instance\nname: a\ncpus: 1\nmemory: 1\ndisk:\n- size: 1\n- base: x\n  buss: virtio\n",
                "a.yaml:8: field disk[1].buss is unknown; did you mean bus?",
            ),
            (
                "kind: instance\nname: a\ncpus: 1\nmemory: 1\ndisk: []\nnetwork: [{float: true}]\nrestart: never\n",
                "a.yaml:6: network[0].network_uuid is missing",
            ),
            (
                "kind: instance\nname: a\ncpus: 1\nmemory: 1\ndisk: []\nrestart: never\n",
                "a.yaml:6: restart must be one of manual, elsewhere, not \"never\"",
            ),
            ("- 7\n", "a.yaml:1: expected an object with the field kind, not a number"),
            ("a: 1\na: 2\n", "a.yaml:2: field a is given twice"),
        ] {
            let error = read_text(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn all_errors_are_reported() {
        let error = read_text(
            "- kind: network\n  nam: a\n- {kind: namespace, name: a}\n- {kind: namespace, name: a}\n",
        );
        let error = error.unwrap_err();
        assert!(error.starts_with("4 errors:\n  a.yaml:2: field nam is unknown"), "{error}");
        assert!(error.ends_with("a.yaml:4: namespace a is already described at a.yaml:3"), "{error}");
    }
}
