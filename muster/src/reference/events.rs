//! The page of events: their types, retention and messages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use muster_types::event::EventType;
use muster_types::settings::Settings;

use super::text::{NOTICE, cell};

pub(super) fn page() -> String {
    let settings = Settings::new(&BTreeMap::new(), &BTreeMap::new()).unwrap();
    let mut page = format!(
        "# Events\n\n{NOTICE} An event belongs to one or more objects and has a type, a message, fields in `extra`, the node, and the id \
         of the request that caused it. `muster events` shows them, [Operating Muster](../operations.md#event-streams) describes the \
         stream, and [Webhooks](../webhooks.md) sends them to other servers.\n\n## Types\n\n\
         | type | content | kept for, in seconds |\n|---|---|---|\n"
    );
    for event_type in EventType::ALL {
        let name = event_type.to_string();
        let setting = format!("MAX_{}_EVENT_AGE", name.to_uppercase());
        let default = settings.effective.iter().find(|setting_of| setting_of.name == setting).unwrap();
        page.push_str(&format!("| `{name}` | {} | `{setting}`: {} |\n", content(*event_type), default.value));
    }
    page.push_str(
        "\n## Messages\n\nMessages by the kind of object, as they are in the code; `{…}` stands for a value. Requests have the message \
         `VERB request from REST API`. Programs should use the type and the fields, because the text of a message may change.\n",
    );
    let mut sources = BTreeMap::new();
    read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../control/src"), "", &mut sources);
    let mut messages: BTreeMap<String, BTreeSet<(String, String)>> = BTreeMap::new();
    for (path, text) in &sources {
        for found in messages_in(text) {
            messages.entry(area(path)).or_default().insert(found);
        }
    }
    let count: usize = messages.values().map(BTreeSet::len).sum();
    assert!(count > 60, "{count} messages were found");
    for (area, found) in messages {
        page.push_str(&format!("\n### {area}\n\n| message | type |\n|---|---|\n"));
        for (message, event_type) in found {
            page.push_str(&format!("| {} | `{event_type}` |\n", cell(&message)));
        }
    }
    page
}

fn content(event_type: EventType) -> &'static str {
    match event_type {
        EventType::Audit => "what a caller requested, and who",
        EventType::Mutate => "a change of the object",
        EventType::Status => "progress and results of work on the object",
        EventType::Usage => "what an instance or a network uses, periodically",
        EventType::Resources => "what a node has and uses, periodically",
        EventType::Prune => "removed events",
        EventType::Historic => "only for compatibility: none are recorded",
        EventType::Health => "damage and its repair",
    }
}

/// Reads the source files of a directory, without tests.
fn read_sources(directory: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            read_sources(&entry.path(), &format!("{prefix}{name}/"), found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned();
            found.insert(format!("{prefix}{name}"), text);
        }
    }
}

/// Returns the kind of objects that a source file is about: the name of its file or folder, in plain words.
fn area(path: &str) -> String {
    let parts: Vec<&str> = path.trim_end_matches(".rs").split('/').collect();
    let name = match parts.as_slice() {
        ["objects", folder, ..] => folder,
        ["operations" | "reconcile", name, ..] => name,
        parts => parts[0],
    };
    let name = name.replace('_', " ");
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Returns the messages of the events that a source file creates, with their types.
fn messages_in(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (start, event_type) in [("Event::audit(", Some("audit")), ("Event::new(EventType::", None)] {
        for part in text.split(start).skip(1) {
            let event_type = match event_type {
                Some(name) => name.to_owned(),
                None => part.split(',').next().unwrap().to_lowercase(),
            };
            if !event_type.chars().all(char::is_alphabetic) {
                continue;
            }
            if let Some(message) = literal_in(arguments(part)) {
                found.push((message, event_type));
            }
        }
    }
    found
}

/// Returns the text before the parenthesis that closes a call.
fn arguments(text: &str) -> &str {
    let (mut depth, mut in_string, mut escaped) = (1, false, false);
    for (index, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            '(' if !in_string => depth += 1,
            ')' if !in_string => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..index];
        }
    }
    text
}

/// Returns the first string of the arguments of a call.
fn literal_in(arguments: &str) -> Option<String> {
    let (_, rest) = arguments.split_once('"')?;
    let (literal, _) = rest.split_once('"')?;
    // A line of a long literal ends with a backslash.
    let joined: Vec<&str> = literal.split('\\').map(str::trim_start).collect();
    let text = if joined.len() > 1 { joined.concat() } else { literal.to_owned() };
    Some(text).filter(|text| text.contains(' '))
}

#[test]
fn finds_messages_in_source_code() {
    let text = r#"record(Event::audit(object(id), "address reserved").with("a", 1));
        Event::new(EventType::Status, object(id), format!("state is {state}"));
        Event::audit(object(id), message);"#;
    let expected = [("address reserved", "audit"), ("state is {state}", "status")];
    assert_eq!(messages_in(text), expected.map(|(message, kind)| (message.to_owned(), kind.to_owned())));
}
