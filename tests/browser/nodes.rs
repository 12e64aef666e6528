//! Nodes and what runs on them: maintenance, drains, migrations, screens of instances, files of guests.

use reqwest::Method;
use serde_json::json;

use crate::chromium::Browser;
use crate::{DESKTOP, HOSTILE, Server};

#[test]
fn drains_a_node_and_migrates_an_instance() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let network = server.create_network("lan", "10.0.0.0/24");
    let instance = server.create_instance("web", &network);
    let node_of = || {
        let record = server.call(Method::GET, &format!("/instances/{instance}"), None);
        record["node"].as_str().unwrap().to_owned()
    };
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for("document.querySelector('.stream-status.live')");

    let first = node_of();
    page.show(&format!("#/nodes/{first}"), "web");
    page.click("Start maintenance");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'maintenance'");
    page.click("End maintenance");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'ready'");
    page.click("Drain");
    // The forecast, before anything happens.
    page.wait_for("document.querySelector('dialog tbody')?.innerText.includes('migrated while it runs')");
    assert_eq!(node_of(), first);
    page.screenshot("drain");
    page.click("Drain");
    page.wait_for_text("all instances have moved");
    page.wait_for_text("No instance runs on this node.");
    page.wait_for_text("drain node");
    page.click("Undrain");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'ready'");
    let second = node_of();
    assert_ne!(second, first);

    page.show(&format!("#/instances/{instance}"), "UUID");
    page.click("Migrate");
    page.wait_for(&format!(
        "[...testHelpers.field('Node').options].some(({{ value }}) => value === {})",
        json!(first)
    ));
    page.evaluate(&format!(
        "testHelpers.field('Node').value = {}; testHelpers.field('Node').dispatchEvent(new Event('input', {{ bubbles: true }}))",
        json!(first)
    ));
    page.click("Migrate");
    page.wait_for(&format!(
        "[...document.querySelectorAll('.facts a')].some((link) => link.textContent === {})",
        json!(first)
    ));
    page.click("Operations");
    page.click("migrate instance");
    page.wait_for("document.querySelectorAll('.steps .done').length === 2");
    page.wait_for_text("Attempts");

    page.show("#/nodes", &first);
    page.click("Rebalance");
    page.wait_for_text("No instance moves");
    page.fill("Maximum number of moves", "0");
    page.wait_for("document.querySelector('dialog .field.failed .error')");
    page.click("Cancel");
    page.show("#/operations", "rebalanced");
    page.check();
}

#[test]
fn shows_screens_checks_the_form_and_copies_files() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let network = server.create_network("lan", "10.0.0.0/24");
    let instance = server.create_instance("web", &network);
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for("document.querySelector('.stream-status.live')");

    page.show("#/instances", "web");
    page.wait_for(
        "document.querySelector('canvas.thumbnail')?.getAttribute('aria-label') === 'Screen of web'",
    );
    let screenshots = |page: &mut crate::chromium::Page<'_>| {
        page.requested_urls().iter().filter(|url| url.ends_with("/screenshot")).count()
    };
    // Its event does not cause another one; only a change of the instance does.
    assert_eq!(screenshots(&mut page), 1);
    server.post(&format!("/instances/{instance}/poweroff"), json!({}));
    page.wait_for("!document.querySelector('canvas.thumbnail')");
    server.post(&format!("/instances/{instance}/poweron"), json!({}));
    page.wait_for("document.querySelector('canvas.thumbnail')");
    page.show("#/instances/new", "Common sizes");
    page.wait_for("testHelpers.field('Network')");
    page.fill("Name", "db");
    page.fill("Memory (MB)", "100000000");
    page.wait_for("document.querySelector('.field.failed, .failure')");
    page.fill("Memory (MB)", "256");
    page.wait_for_text("Checked: it would run on sim-");
    let count = |server: &Server| server.call(Method::GET, "/instances", None).as_array().unwrap().len();
    assert_eq!(count(&server), 1, "a check creates nothing");

    page.show(&format!("#/instances/{instance}?tab=agent"), "Copy to");
    let name = HOSTILE.replace('/', "_");
    page.evaluate(&format!("testHelpers.drop({}, 'the content')", json!(name)));
    page.wait_for("document.querySelector('.run .state.good')?.textContent === 'complete'");
    page.fill("File in the guest", &format!("/root/{name}"));
    page.click("Read");
    page.wait_for("document.querySelector('.run a[download]')");
    let read = "fetch(document.querySelector('.run a[download]').href).then((response) => response.text())";
    assert_eq!(page.evaluate(read), json!("the content"));
    page.fill("File in the guest", "relative");
    page.click("Read");
    page.wait_for("document.querySelector('.field.failed input[name=path], .failure')");
    let artifacts = server.call(Method::GET, "/artifacts", None);
    assert_eq!(artifacts, json!([]), "the temporary artifact is deleted");
    assert_eq!(page.evaluate("document.querySelectorAll('main img, main script').length"), json!(0));
    assert!(page.evaluate("document.title") != "owned");
    page.check();
}
