//! The consoles of a real guest.

use muster_test_cluster::{enter_vm_namespaces, single_vm_host};
use reqwest::Method;
use serde_json::json;

use crate::DESKTOP;
use crate::chromium::Browser;

/// The text of the terminal.
const TERMINAL_TEXT: &str = "(document.querySelector('.xterm-rows')?.innerText ?? '')";

#[test]
fn guest_boots_in_both_consoles() {
    if !enter_vm_namespaces("guests::guest_boots_in_both_consoles") {
        return;
    }
    let cluster = single_vm_host(&[]);
    let host = cluster.host(1);
    let Some(mut browser) = host.namespace.run(Browser::start) else { return };
    let url = host.url();
    let ticket = host.post("/auth/login-tickets", None)["ticket"].as_str().unwrap().to_owned();
    let mut page = browser.open(&url, DESKTOP);
    page.prefer("dark");
    page.load(&format!("/ui/#ticket={ticket}"));
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");

    page.load("/ui/#/instances/new");
    page.wait_for("testHelpers.field('Image')?.selectedOptions[0]?.textContent.startsWith('tiny')");
    page.fill("Name", "guest");
    page.fill("Memory (MB)", "128");
    page.click("Create");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'on'");

    page.click("Serial console");
    page.wait_for(&format!("{TERMINAL_TEXT}.includes('login:')"));
    page.wait_for(
        "[...document.querySelectorAll('.heading .state')].some((one) => one.textContent === 'connected')",
    );
    page.evaluate("document.querySelector('.xterm-helper-textarea').focus()");
    page.type_text("root");
    page.press("Enter", 13, 0);
    page.wait_for(&format!("{TERMINAL_TEXT}.includes('# ')"));
    page.type_text("echo typed-$((40 + 2)); uname -sr");
    page.press("Enter", 13, 0);
    page.wait_for(&format!("{TERMINAL_TEXT}.includes('typed-42')"));
    page.screenshot("serial-console");
    page.check();

    page.click("Screen");
    page.wait_for(
        "[...document.querySelectorAll('.heading .state')].some((one) => one.textContent === 'connected')",
    );
    page.wait_for("document.querySelector('.screen canvas')?.width > 100");
    page.screenshot("screen");
    page.check();
    drop(page);
    drop(browser);
    let instances = host.get("/instances");
    let uuid = instances[0]["uuid"].as_str().unwrap();
    assert_eq!(host.call(Method::DELETE, &format!("/instances/{uuid}"), Some(json!({}))).0, 200);
}
