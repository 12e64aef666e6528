//! Shell completion, with the names of the objects of the cluster. The scripts call a hidden command of the program with
//! the words of the command line and print its candidates. See docs/decisions/0091.

use std::time::Duration;

use clap::{Arg, ArgAction, Command, ValueEnum, ValueHint};
use serde_json::Value;
use tokio::time::timeout;

use crate::api::Client;
use crate::output::names;
use crate::profiles::{DEFAULT_PROFILE, Profiles};

/// The time that the user waits at most for names.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// The line that makes the scripts add file names.
const FILES: &str = ":files";

/// A shell with a completion script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Shell {
    /// Returns the completion script.
    #[must_use]
    pub fn script(self) -> &'static str {
        match self {
            Self::Bash => include_str!("complete/muster.bash"),
            Self::Zsh => include_str!("complete/muster.zsh"),
            Self::Fish => include_str!("complete/muster.fish"),
        }
    }
}

/// The words that can follow on a command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    /// Words and their descriptions.
    words: Vec<(String, String)>,
    /// The part of the incomplete word before its value: `--option=`.
    prefix: String,
    /// Names of which objects can follow.
    objects: Option<Objects>,
    /// Whether a file name can follow.
    files: bool,
    /// The global options of the line, for the client that looks up names.
    pub options: Vec<String>,
}

/// Objects whose names are completed.
#[derive(Debug, PartialEq, Eq)]
enum Objects {
    /// The records of lists of the API.
    Lists(Vec<String>),
    Profiles,
}

impl Candidates {
    /// Returns whether the cluster is asked for names.
    #[must_use]
    pub fn need_client(&self) -> bool {
        matches!(self.objects, Some(Objects::Lists(_)))
    }

    /// Returns the lines for the script: each a word, and after a tab its description. Names that cannot be looked up are omitted.
    pub async fn lines(mut self, client: Option<&Client>) -> String {
        match (self.objects.take(), client) {
            (Some(Objects::Profiles), _) => {
                let known = Profiles::for_current_user().and_then(|profiles| profiles.names().ok());
                let known = known.unwrap_or_default().into_iter().chain([DEFAULT_PROFILE.to_owned()]);
                self.words.extend(known.map(|name| (name, String::new())));
            }
            (Some(Objects::Lists(lists)), Some(client)) => {
                for list in lists {
                    let found = timeout(LOOKUP_TIMEOUT, client.names(&list)).await;
                    if let Ok(Ok(Value::Array(records))) = found {
                        self.words.extend(records.iter().filter_map(candidate));
                    }
                }
            }
            _ => {}
        }
        let prefix = self.prefix;
        // A word with a control character would break the line or the terminal.
        self.words.retain(|(word, _)| !word.contains(char::is_control));
        let mut lines: String = self
            .words
            .iter()
            .map(|(word, about)| format!("{prefix}{word}\t{}\n", about.replace(char::is_control, " ")))
            .collect();
        if self.files {
            lines.push_str(&format!("{FILES}\n"));
        }
        lines
    }
}

/// Returns the name of a record, and its state as a description.
fn candidate(record: &Value) -> Option<(String, String)> {
    let name = names(record).pop()?;
    let state = record.get("state").and_then(Value::as_str).unwrap_or_default();
    Some((name, state.to_owned()))
}

/// Returns what can follow `words`, of which the last one is incomplete. The name of the program is not among them.
#[must_use]
pub fn candidates(mut root: Command, words: &[String]) -> Candidates {
    root.build();
    let (last, complete) =
        words.split_last().map_or(("", [].as_slice()), |(last, rest)| (last.as_str(), rest));
    let mut line = Line {
        command: &root,
        path: vec![],
        positionals: vec![],
        pending: None,
        is_literal: false,
        options: vec![],
    };
    for word in complete {
        line.read(word);
    }
    line.candidates(last)
}

/// The state after some words of a command line.
struct Line<'a> {
    command: &'a Command,
    /// The names of the command and of those that contain it.
    path: Vec<&'a str>,
    positionals: Vec<String>,
    /// An option whose value follows.
    pending: Option<&'a Arg>,
    /// Whether `--` was read, after which there are no options.
    is_literal: bool,
    options: Vec<String>,
}

impl<'a> Line<'a> {
    fn read(&mut self, word: &str) {
        if let Some(option) = self.pending.take() {
            self.keep_global(option, word);
        } else if self.is_literal {
            self.positionals.push(word.to_owned());
        } else if word == "--" {
            self.is_literal = true;
        } else if let Some(long) = word.strip_prefix("--") {
            let (name, value) =
                long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
            let option = self.options().find(|option| option.get_long() == Some(name));
            self.read_option(option, value);
        } else if let Some(short) = word.strip_prefix('-').and_then(|flags| flags.chars().last()) {
            let option = self.options().find(|option| option.get_short() == Some(short));
            self.read_option(option, None);
        } else if let Some(command) = self.subcommand(word) {
            self.command = command;
            self.path.push(command.get_name());
            self.positionals.clear();
        } else {
            self.positionals.push(word.to_owned());
        }
    }

    fn read_option(&mut self, option: Option<&'a Arg>, value: Option<&str>) {
        match (option.filter(|option| takes_value(option)), value) {
            (Some(option), Some(value)) => self.keep_global(option, value),
            (option, None) => self.pending = option,
            (None, Some(_)) => {}
        }
    }

    /// Keeps an option that selects the cluster.
    fn keep_global(&mut self, option: &Arg, value: &str) {
        if option.is_global_set()
            && let Some(long) = option.get_long()
        {
            self.options.push(format!("--{long}={value}"));
        }
    }

    fn options(&self) -> impl Iterator<Item = &'a Arg> + use<'a> {
        self.command.get_arguments().filter(|argument| !argument.is_positional() && !argument.is_hide_set())
    }

    /// Returns the subcommand with a name. An argument of the same name cannot precede it.
    fn subcommand(&self, name: &str) -> Option<&'a Command> {
        self.positionals.is_empty().then(|| self.command.find_subcommand(name)).flatten()
    }

    fn candidates(self, mut last: &str) -> Candidates {
        let mut found = Candidates::default();
        let with_value = last.strip_prefix("--").and_then(|long| long.split_once('='));
        if let Some((name, value)) = with_value.filter(|_| !self.is_literal && self.pending.is_none()) {
            if let Some(option) = self.options().find(|option| option.get_long() == Some(name)) {
                found.prefix = format!("--{name}=");
                self.add_values(option, &mut found);
            }
            last = value;
        } else if let Some(option) = self.pending {
            self.add_values(option, &mut found);
        } else if last.starts_with('-') && !self.is_literal {
            let options = self.options().filter_map(|option| Some((option.get_long()?, option.get_help())));
            let text =
                |help: Option<&clap::builder::StyledStr>| help.map(ToString::to_string).unwrap_or_default();
            found.words.extend(options.map(|(long, help)| (format!("--{long}"), text(help))));
        } else {
            if self.positionals.is_empty() && !self.is_literal {
                let commands = self.command.get_subcommands().filter(|command| !command.is_hide_set());
                let about =
                    |command: &Command| command.get_about().map(ToString::to_string).unwrap_or_default();
                found.words.extend(commands.map(|command| (command.get_name().to_owned(), about(command))));
            }
            let mut positionals: Vec<&Arg> = self.command.get_positionals().collect();
            positionals.sort_by_key(|argument| argument.get_index());
            // The last argument may be repeated.
            let next = positionals
                .get(self.positionals.len())
                .or_else(|| positionals.last().filter(|last| matches!(last.get_action(), ArgAction::Append)));
            if let Some(argument) = next {
                self.add_values(argument, &mut found);
            }
        }
        found.words.retain(|(word, _)| word.starts_with(last));
        found.options = self.options;
        found
    }

    /// Adds the values of an argument.
    fn add_values(&self, argument: &Arg, found: &mut Candidates) {
        if !takes_value(argument) {
            return;
        }
        let values = argument.get_possible_values();
        let is_file = matches!(
            argument.get_value_hint(),
            ValueHint::FilePath | ValueHint::AnyPath | ValueHint::DirPath
        );
        if !values.is_empty() {
            let about = |value: &clap::builder::PossibleValue| value.get_help().map(ToString::to_string);
            found.words.extend(
                values.iter().map(|value| (value.get_name().to_owned(), about(value).unwrap_or_default())),
            );
        } else if let Some(objects) = self.objects(argument.get_id().as_str()) {
            found.objects = Some(objects);
        } else if is_file || is_path(argument) {
            found.files = true;
        }
    }

    /// Returns the objects that an argument names.
    fn objects(&self, id: &str) -> Option<Objects> {
        let list = |path: &str| Some(Objects::Lists(vec![path.to_owned()]));
        let of_namespace = |noun: &str| {
            let namespace = self.positionals.first()?;
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            let is_plain = namespace.chars().all(is_plain) && !namespace.starts_with('.');
            is_plain.then(|| Objects::Lists(vec![format!("/auth/namespaces/{namespace}/{noun}")]))
        };
        let noun = self.path.first().copied().unwrap_or_default();
        let verb = self.path.last().copied().unwrap_or_default();
        match (noun, id) {
            // A new object has a new name.
            (_, "name") if matches!(verb, "create" | "add" | "upload") => None,
            (_, "as_profile") | ("profile", "name") => Some(Objects::Profiles),
            (_, "instance" | "instances") => list("/instances"),
            (_, "network") => list("/networks"),
            (_, "artifact") => list("/artifacts"),
            (_, "node" | "placed_on" | "to") => list("/nodes"),
            (_, "namespace" | "as_namespace" | "in_namespace" | "other") => list("/auth/namespaces"),
            ("why", "reference") => {
                Some(Objects::Lists(vec!["/instances".to_owned(), "/networks".to_owned()]))
            }
            ("namespace", "name") => list("/auth/namespaces"),
            ("events", "name") if verb == "node" => list("/nodes"),
            ("events", "name") => list("/auth/namespaces"),
            ("issuer", "name") | ("rule", "issuer") => list("/auth/issuers"),
            ("key", "name") => of_namespace("keys"),
            ("rule", "name") => of_namespace("rules"),
            ("webhook", "name") => of_namespace("webhooks"),
            ("claim", "claim") => of_namespace("claims"),
            ("blob", "uuid") => list("/blobs"),
            _ => None,
        }
    }
}

fn takes_value(argument: &Arg) -> bool {
    matches!(argument.get_action(), ArgAction::Set | ArgAction::Append)
}

/// Returns whether an argument is a path, by the name of its value.
fn is_path(argument: &Arg) -> bool {
    let names = argument.get_value_names().unwrap_or_default();
    names.iter().any(|name| name.contains("FILE") || name.contains("DIR"))
        || matches!(argument.get_id().as_str(), "source" | "destination")
}

#[cfg(test)]
mod tests;
