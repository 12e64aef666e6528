//! Rules of accessibility, checked by axe-core.

use serde_json::{Value, json};

use crate::chromium::Browser;
use crate::{DESKTOP, Server};

const AXE: &str = include_str!("axe.min.js");

/// Pages, and a condition that holds once each is shown.
const PAGES: [(&str, &str); 10] = [
    ("#/", "document.querySelector('.meter')"),
    ("#/instances", "document.querySelector('.vtable .row')"),
    ("#/instances/new", "testHelpers.field('Name')"),
    ("#/networks?view=topology", "document.querySelector('.topology')"),
    ("#/networks?create=1", "testHelpers.field('Netblock')"),
    ("#/artifacts?add=1", "testHelpers.field('URL or name')"),
    ("#/nodes", "document.querySelector('.vtable .meter')"),
    ("#/namespaces/system", "document.querySelector('tbody td')"),
    ("#/operations", "document.querySelector('h1')?.textContent === 'Operations'"),
    ("#/events", "testHelpers.field('Filter events')"),
];

#[test]
fn pages_have_no_serious_accessibility_problems() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let network = server.create_network("lan", "10.0.0.0/24");
    let body = json!({ "name": "web", "cpus": 1, "memory": 256, "disk": [{ "size": 1 }],
        "network": [{ "network_uuid": network }] });
    let instance = server.post("/instances", body)["uuid"].as_str().unwrap().to_owned();
    let instance_page = format!("#/instances/{instance}");
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    // The policy of the page must not limit the checker.
    page.call("Page.setBypassCSP", &json!({ "enabled": true }));
    page.load(&server.login_path());
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");
    let shown = (instance_page.as_str(), "document.querySelector('.history li')");
    for scheme in ["light", "dark"] {
        page.prefer(scheme);
        for (route, condition) in PAGES.into_iter().chain([shown]) {
            page.load(&format!("/ui/{route}"));
            // A change of the fragment alone does not load the page again.
            page.wait_for(&format!("location.hash === {} && {condition}", json!(route)));
            page.evaluate("testHelpers.settle()");
            page.evaluate(AXE);
            let found = page.evaluate(
                "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
                    .filter(({ impact }) => impact === 'serious' || impact === 'critical')
                    .map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`))",
            );
            assert_eq!(found, Value::Array(vec![]), "{scheme} {route}");
        }
    }
    page.check();
}
