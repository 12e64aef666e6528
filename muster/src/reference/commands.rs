//! The page of all commands, their options and examples.

use clap::builder::{PossibleValue, Str};
use clap::{Arg, ArgAction, Command, CommandFactory as _};

use super::text::{NOTICE, cell, code};
use crate::Cli;

pub(super) fn page() -> String {
    let mut root = muster_client::with_examples(Cli::command());
    root.build();
    let mut page = format!(
        "# Commands\n\n{NOTICE} What all commands have in common is in [The command line](../cli.md). Exit codes are \
         [there](../cli.md#exit-codes), too.\n\n## Options of all commands\n\n"
    );
    page.push_str(&arguments(&root, Arg::is_global_set));
    for command in visible(&root) {
        section(command, &format!("muster {}", command.get_name()), "##", &mut page);
    }
    page
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
}

/// Adds a command and its subcommands.
fn section(command: &Command, path: &str, heading: &str, page: &mut String) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    assert!(!about.is_empty(), "{path} has no description");
    page.push_str(&format!("\n{heading} {path}\n\n{}.\n", cell(&about).trim_end_matches('.')));
    let inner: Vec<&Command> = visible(command).collect();
    if inner.is_empty() || command.get_arguments().any(is_own) {
        let usage = command.clone().bin_name(path).render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        page.push_str(&format!("\n```text\n{usage}\n```\n"));
        let table = arguments(command, is_own);
        if !table.is_empty() {
            page.push_str(&format!("\n{table}"));
        }
        page.push_str(&examples(command, path));
    }
    // Deeper commands are on the same level: the navigation of the page lists two.
    for command in inner {
        section(command, &format!("{path} {}", command.get_name()), "###", page);
    }
}

/// Returns whether an argument belongs to a command alone.
fn is_own(argument: &Arg) -> bool {
    let is_builtin = matches!(
        argument.get_action(),
        ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
    );
    !argument.is_global_set() && !argument.is_hide_set() && !is_builtin
}

/// Returns the table of the arguments of a command.
fn arguments(command: &Command, is_listed: impl Fn(&Arg) -> bool) -> String {
    let mut rows = String::new();
    for argument in command.get_arguments().filter(|argument| is_listed(argument)) {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        rows.push_str(&format!("| {} | {} |\n", code(&name(argument)), meaning(argument, &help)));
    }
    if rows.is_empty() { rows } else { format!("| argument | meaning |\n|---|---|\n{rows}") }
}

/// Returns the forms of an argument, such as `-o, --format FORMAT`.
fn name(argument: &Arg) -> String {
    let value = if argument.get_action().takes_values() {
        let names = argument.get_value_names().unwrap_or_default();
        names.iter().map(Str::as_str).collect::<Vec<_>>().join(" ")
    } else {
        String::new()
    };
    let flags = [
        argument.get_short().map(|short| format!("-{short}")),
        argument.get_long().map(|long| format!("--{long}")),
    ];
    let flags = flags.into_iter().flatten().collect::<Vec<_>>().join(", ");
    format!("{flags} {value}").trim().to_owned()
}

fn meaning(argument: &Arg, help: &str) -> String {
    let mut parts = vec![cell(help)];
    let values = argument.get_possible_values();
    let values: Vec<&str> =
        values.iter().filter(|value| !value.is_hide_set()).map(PossibleValue::get_name).collect();
    if !values.is_empty() && argument.get_action().takes_values() {
        parts.push(values.iter().map(|value| code(value)).collect::<Vec<_>>().join(", "));
    }
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && argument.get_id() == "data_dir" {
        // The default is that of the user who runs the test.
        parts.push("default `/var/lib/muster` for root, else `~/.local/share/muster`".to_owned());
    } else if !defaults.is_empty() && argument.get_action().takes_values() {
        parts.push(format!("default {}", code(&defaults.join(" "))));
    }
    if let Some(variable) = argument.get_env() {
        parts.push(format!("also {}", code(&variable.to_string_lossy())));
    }
    parts.retain(|part| !part.is_empty());
    parts.join("; ")
}

fn examples(command: &Command, path: &str) -> String {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (_, examples) = help.split_once("Examples:\n").unwrap_or_else(|| panic!("{path} has no example"));
    let lines: Vec<&str> = examples.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    format!("\n```sh\n{}\n```\n", lines.join("\n"))
}
