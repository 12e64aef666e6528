//! The pages of issuers, rules, claims and webhooks.

use muster_testing::web_server::{Reply, WebServer};
use reqwest::Method;
use serde_json::{Value, json};

use crate::chromium::{Browser, Page};
use crate::{DESKTOP, HOSTILE, Server};

/// More namespaces than the first part of a list has.
const MANY: usize = 65;

/// Deletes what a page shows, and waits until another page is shown.
fn delete(page: &mut Page<'_>, control: &str, doomed: &str, word: Option<&str>) {
    page.click(control);
    page.wait_for(&format!(
        "document.querySelector('dialog .doomed')?.innerText.includes({})",
        json!(doomed)
    ));
    if let Some(word) = word {
        assert_eq!(page.evaluate("testHelpers.control('Delete')"), Value::Null, "the name is not typed yet");
        page.fill(&format!("Type {word} to confirm"), word);
    }
    page.click("Delete");
    page.wait_for("!document.querySelector('dialog')");
}

#[test]
fn manages_issuers_rules_and_claims() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    server.post("/auth/namespaces", json!({ "namespace": "ci" }));
    for number in 0..MANY {
        server.post("/auth/namespaces", json!({ "namespace": format!("team-{number}") }));
    }
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for("document.querySelector('.live.live')");
    // `ci`, `system` and the head are rows, too.
    page.show("#/namespaces", "team-0");
    let rows = format!("document.querySelector('.vtable').getAttribute('aria-rowcount') === '{}'", MANY + 3);
    page.wait_for(&rows);

    page.show("#/issuers", "No issuer is trusted");
    page.click("Create issuer");
    page.fill("Name", "forge");
    page.fill("Issuer URL", &format!("https://forge.example/{HOSTILE}"));
    page.fill("URL of its keys", "http://forge.example/keys");
    page.fill("Audience", HOSTILE);
    page.click("Create");
    page.wait_for("document.querySelector('.field.failed input[name=jwks_uri]')");
    page.wait_for("document.querySelector('dialog .request-id code')");
    page.fill("URL of its keys", "https://forge.example/keys");
    page.click("Create");
    page.wait_for_text(HOSTILE);
    page.click("forge");
    page.wait_for(
        "document.querySelector('h1')?.textContent === 'forge' && document.querySelector('.events li')",
    );
    page.wait_for_text(HOSTILE);

    page.show("#/namespaces/ci?tab=rules", "No rules.");
    page.click("Create rule");
    page.fill("Name", "deploy");
    page.fill("Issuer", "forge");
    page.fill("Required claims", "no claim");
    page.fill("Scopes", "blob.read");
    page.fill("Prefix of key names", "ci");
    page.click("Create");
    page.wait_for("document.querySelector('.field.failed textarea[name=bound_claims]')");
    page.fill("Required claims", &format!("ref=main\nref=next\nnote={HOSTILE}"));
    page.click("Create");
    page.wait_for_text(&format!("note={HOSTILE}"));
    let rule = server.call(Method::GET, "/auth/namespaces/ci/rules/deploy", None);
    assert_eq!(rule["bound_claims"], json!({ "ref": ["main", "next"], "note": HOSTILE }));
    page.click("deploy");
    page.wait_for("document.querySelector('h1')?.textContent === 'deploy'");
    page.click("Change");
    page.fill("Lifetime of keys (s)", "600");
    page.click("Save");
    page.wait_for_text("10 min");
    delete(&mut page, "Delete", &format!("note={HOSTILE}"), None);
    page.wait_for_text("No rules.");

    page.show("#/namespaces/ci?tab=claims", "No claims.");
    page.click("Create claim");
    page.fill("CPUs", "-1");
    page.fill("Memory (MB)", "512");
    page.fill("Disk (GB)", "4");
    page.click("Create");
    page.wait_for("document.querySelector('.field.failed input[name=limit_cpus]')");
    page.fill("CPUs", "2");
    page.click("Create");
    page.wait_for_text("0 of 512");
    let claim = server.call(Method::GET, "/auth/namespaces/ci/claims", None)[0]["uuid"].clone();
    let path = format!("/auth/namespaces/ci/claims/{}/metadata", claim.as_str().unwrap());
    server.post(&path, json!({ "key": "note", "value": HOSTILE }));
    page.show(&format!("#/namespaces/ci/claims/{}", claim.as_str().unwrap()), HOSTILE);
    delete(&mut page, "Delete", "2 CPUs, 512 MB of memory", None);
    page.wait_for_text("No claims.");

    page.show("#/issuers/forge", HOSTILE);
    delete(&mut page, "Delete", &format!("https://forge.example/{HOSTILE}"), Some("forge"));
    page.wait_for_text("No issuer is trusted");
    assert_eq!(page.evaluate("document.querySelectorAll('main img, main script').length"), json!(0));
    assert!(page.evaluate("document.title") != "owned");
    page.check();
}

#[test]
fn shows_the_secret_of_a_webhook_once_and_the_log_of_its_deliveries() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    // The receiver refuses the first request.
    let receiver = server
        .runtime
        .block_on(WebServer::new(|_, earlier| Reply::status(if earlier == 0 { 503 } else { 200 })));
    let body = json!({ "namespace": "ci", "key_name": "k", "key": "secret of ci" });
    server.post("/auth/namespaces", body);
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load("/ui/");
    page.fill("Namespace", "ci");
    page.fill("Key", "secret of ci");
    page.click("Log in");
    page.wait_for("document.querySelector('.live.live')");

    page.show("#/namespaces/ci", "Add key");
    page.click("Add key");
    page.fill("Name", "pipeline");
    page.click("Add");
    page.wait_for("document.querySelector('dialog .copy code')?.textContent.startsWith('sfk_')");
    page.click("Done");
    page.wait_for_text("pipeline");

    page.show("#/namespaces/ci?tab=webhooks", "No webhooks.");
    // What only administrators may see.
    for tab in ["Claims", "Events"] {
        let found = page.evaluate(&format!(
            "[...document.querySelectorAll('.tabs button')].some((tab) =>
            tab.textContent.trim() === {})",
            json!(tab)
        ));
        assert_eq!(found, json!(false), "{tab}");
    }
    page.click("Create webhook");
    page.fill("Name", "chat");
    page.fill("URL", "http://192.168.0.1/");
    page.fill("Start of the message", HOSTILE);
    page.click("Create");
    page.wait_for("document.querySelector('.field.failed input[name=url]')");
    page.fill("URL", &receiver.url("/hook"));
    page.click("Create");
    page.wait_for("document.querySelector('dialog .copy code')");
    let secret = page.evaluate("document.querySelector('dialog .copy code').textContent");
    page.click("Done");
    page.click("chat");
    page.wait_for("document.querySelector('h1')?.textContent === 'chat'");
    page.wait_for_text(HOSTILE);
    assert_eq!(page.evaluate(&format!("document.body.innerHTML.includes({secret})")), json!(false));

    page.click("Test");
    page.wait_for_text("the receiver responded with 503");
    page.click("Redeliver");
    page.wait_for("document.querySelector('tbody .state.good')?.textContent === 'delivered'");
    page.click("Rotate secret");
    page.click("Rotate");
    page.wait_for("document.querySelector('dialog .copy code')");
    assert!(page.evaluate("document.querySelector('dialog .copy code').textContent") != secret);
    page.click("Done");
    page.wait_for_text("Previous secret until");
    page.screenshot("webhook");
    delete(&mut page, "Delete", "its log of deliveries", None);
    page.wait_for_text("No webhooks.");
    assert_eq!(page.evaluate("document.querySelectorAll('main img, main script').length"), json!(0));
    page.check();
}

/// Returns a condition: a meter of the page shows a text.
fn meter_shows(label: &str, text: &str) -> String {
    let selector = format!("[role=meter][aria-label={}]", json!(label));
    format!("document.querySelector({})?.getAttribute('aria-valuetext') === {}", json!(selector), json!(text))
}

#[test]
fn overview_shows_usage_and_quotas_of_namespaces_as_they_change() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let body = json!({ "namespace": "ci", "key_name": "k", "key": "secret of ci" });
    server.post("/auth/namespaces", body);
    let set_limit = |name: &str, limit: u64| {
        let path = format!("/auth/namespaces/ci/quotas/{name}");
        server.call(Method::PUT, &path, Some(json!({ "limit": limit })));
    };
    set_limit("cpus", 4);
    let create = |name: &str| {
        let body = json!({ "name": name, "cpus": 1, "memory": 256, "disk": [{ "size": 2 }], "network": [],
            "namespace": "ci" });
        server.post("/instances", body)["uuid"].as_str().unwrap().to_owned()
    };
    create("one");
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for(&meter_shows("CPUs of ci", "1 of 4"));
    page.wait_for_text("no limit");
    let other = create("two");
    page.wait_for(&meter_shows("CPUs of ci", "2 of 4"));
    set_limit("cpus", 8);
    page.wait_for(&meter_shows("CPUs of ci", "2 of 8"));
    set_limit("disk_gb", 16);
    page.wait_for(&meter_shows("Disk (GB) of ci", "4 of 16"));
    server.call(Method::DELETE, &format!("/instances/{other}"), None);
    page.wait_for(&meter_shows("CPUs of ci", "1 of 8"));
    page.check();

    // Users see the quotas of their namespace. They get no events of it, but those of its instances.
    page.click("Log out");
    page.fill("Namespace", "ci");
    page.fill("Key", "secret of ci");
    page.click("Log in");
    page.wait_for(&meter_shows("CPUs", "1 of 8"));
    create("three");
    page.wait_for(&meter_shows("CPUs", "2 of 8"));
    page.check();
}
