//! Generates the pages of `docs/reference` from code. See docs/decisions/0099.

mod api;
mod commands;
mod events;
mod settings;

use muster_testing::assert_committed;

/// The first lines of every page after its title.
const NOTICE: &str = "This page is generated from the source code of this version.";

fn check(page: &str, content: &str) {
    assert_committed(&format!("docs/reference/{page}"), content, "-p muster --bin muster reference");
}

/// Returns text as the content of a table's cell, in one line.
fn cell(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.replace('|', "\\|").replace('<', "\\<").replace('*', "\\*")
}

/// Returns text in code style as the content of a table's cell, or nothing.
fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}

#[test]
fn settings_page_is_current() {
    check("settings.md", &settings::page());
}

#[test]
fn commands_page_is_current() {
    check("cli.md", &commands::page());
}

#[test]
fn api_page_is_current() {
    check("api.md", &api::page());
}

#[test]
fn events_page_is_current() {
    check("events.md", &events::page());
}
