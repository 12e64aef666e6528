//! Rules of accessibility, checked by axe-core.

use serde_json::{Value, json};

use crate::chromium::{Browser, Page};
use crate::{DESKTOP, Server};

const AXE: &str = include_str!("axe.min.js");

/// Pages, and a condition that holds once each is shown.
const PAGES: [(&str, &str); 14] = [
    ("#/", "document.querySelector('.meter')"),
    ("#/instances", "document.querySelector('.vtable .row')"),
    ("#/instances/new", "testHelpers.field('Name')"),
    ("#/networks?view=topology", "document.querySelector('.topology')"),
    ("#/networks?create=1", "testHelpers.field('Netblock')"),
    ("#/artifacts?add=1", "testHelpers.field('URL or name')"),
    ("#/nodes", "document.querySelector('.vtable .meter')"),
    ("#/namespaces/system", "document.querySelector('tbody td')"),
    ("#/namespaces/system?tab=rules", "document.querySelector('.row-name')"),
    ("#/namespaces/system/webhooks/chat", "testHelpers.control('Redeliver')"),
    ("#/issuers", "document.querySelector('.row-name')"),
    ("#/nodes/sim-1", "document.querySelector('.facts')"),
    ("#/operations", "document.querySelector('h1')?.textContent === 'Operations'"),
    ("#/events", "testHelpers.field('Filter events')"),
];

/// A page, the control that opens a dialog, and a condition that holds once it is shown.
const DIALOGS: [(&str, &str, &str); 4] = [
    ("#/namespaces/system?tab=webhooks", "Create webhook", "testHelpers.field('URL')"),
    ("#/namespaces/system?tab=claims", "Create claim", "testHelpers.field('CPUs')"),
    ("#/nodes/sim-1", "Drain", "document.querySelector('dialog td, dialog .empty')"),
    ("#/nodes", "Rebalance", "document.querySelector('dialog .meter')"),
];

#[test]
fn pages_have_no_serious_accessibility_problems() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let network = server.create_network("lan", "10.0.0.0/24");
    let instance = server.create_instance("web", &network);
    add_administration(&server);
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    // The policy of the page must not limit the checker.
    page.call("Page.setBypassCSP", &json!({ "enabled": true }));
    page.load(&server.login_path());
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");
    let instance_pages = [
        (format!("#/instances/{instance}"), "document.querySelector('.history li')"),
        (format!("#/instances/{instance}?tab=agent"), "testHelpers.field('Copy to')"),
    ];
    let instance_pages = instance_pages.iter().map(|(route, condition)| (route.as_str(), *condition));
    let pages: Vec<_> = PAGES.into_iter().chain(instance_pages).collect();
    for scheme in ["light", "dark"] {
        page.prefer(scheme);
        for (route, condition) in &pages {
            page.load(&format!("/ui/{route}"));
            // A change of the fragment alone does not load the page again.
            page.wait_for(&format!("location.hash === {} && {condition}", json!(route)));
            check(&mut page, &format!("{scheme} {route}"));
        }
        for (route, control, condition) in DIALOGS {
            page.load(&format!("/ui/{route}"));
            page.wait_for(&format!("location.hash === {}", json!(route)));
            page.click(control);
            page.wait_for(condition);
            check(&mut page, &format!("{scheme} {route} {control}"));
            page.click("Cancel");
        }
    }
    page.check();
}

/// Adds one of each object that the pages of namespaces and issuers show.
fn add_administration(server: &Server) {
    let issuer = json!({ "name": "forge", "issuer_url": "https://forge.example", "audience": "muster",
        "jwks_uri": "https://forge.example/keys" });
    server.post("/auth/issuers", issuer);
    let rule = json!({ "name": "deploy", "issuer": "forge", "bound_claims": { "ref": "main" },
        "scopes": ["blob.read"], "key_ttl": 900, "key_name_prefix": "ci" });
    server.post("/auth/namespaces/system/rules", rule);
    let webhook = json!({ "name": "chat", "url": "http://127.0.0.1:9/", "event_types": ["prune"] });
    server.post("/auth/namespaces/system/webhooks", webhook);
    server.post("/auth/namespaces/system/webhooks/chat/test", json!({}));
}

fn check(page: &mut Page<'_>, what: &str) {
    page.evaluate("testHelpers.settle()");
    page.evaluate(AXE);
    let found = page.evaluate(
        "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
            .filter(({ impact }) => impact === 'serious' || impact === 'critical')
            .map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`))",
    );
    assert_eq!(found, Value::Array(vec![]), "{what}");
}
