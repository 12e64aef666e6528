//! Generates the pages of `docs/reference` from code. See docs/decisions/0099.

mod api;
mod commands;
mod events;
mod settings;
mod text;

use muster_testing::assert_committed;

fn check(page: &str, content: &str) {
    assert_committed(&format!("docs/reference/{page}"), content, "-p muster --bin muster reference");
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
