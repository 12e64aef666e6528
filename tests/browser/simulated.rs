//! Pages on simulated nodes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::Method;
use serde_json::{Value, json};

use crate::chromium::Browser;
use crate::{DESKTOP, HOSTILE, Server};

/// The maximum size of everything that the first view loads, without instances.
const MAX_FIRST_VIEW_BYTES: f64 = 300_000.0;
/// How long a change made elsewhere may take to appear.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// How often the delay is measured; a busy host may exceed it some times.
const ATTEMPTS: usize = 8;

/// Uploads an artifact that instances can boot from.
pub(crate) fn upload_image(server: &Server, name: &str) {
    let upload = server.post("/upload", json!({}));
    let uuid = upload["uuid"].as_str().unwrap();
    let request = reqwest::Client::new()
        .post(format!("{}/upload/{uuid}?offset=0", server.daemon.url))
        .bearer_auth(&server.token)
        .body(vec![7_u8; 1 << 20]);
    let response = server.runtime.block_on(async { request.send().await.unwrap() });
    assert!(response.status().is_success());
    server.post(&format!("/artifacts/upload/{name}"), json!({ "upload_uuid": uuid, "shared": true }));
}

#[test]
fn logs_in_by_ticket_and_creates_a_network_and_an_instance() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    upload_image(&server, "debian-12");
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.prefer("light");
    page.load(&server.login_path());
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");
    page.wait_for_text("Nodes ready");
    let bytes = page.received_bytes();
    assert!(bytes > 10_000.0 && bytes < MAX_FIRST_VIEW_BYTES, "the first view has {bytes} bytes");
    assert!(!page.evaluate("location.href").as_str().unwrap().contains("ticket"));

    page.press("k", 75, 2);
    page.fill("Page, object or action", "create net");
    page.press("Enter", 13, 0);
    page.fill("Name", "lan");
    page.fill("Netblock", "10.0.0.0/33");
    page.click("Create");
    page.wait_for("document.querySelector('dialog .field.failed .error')");
    page.screenshot("field-error");
    page.fill("Netblock", "10.0.0.0/24");
    page.click("Create");
    page.wait_for(
        "document.querySelector('h1')?.textContent === 'lan' && document.querySelector('.state.good')",
    );

    page.load("/ui/#/instances/new");
    page.wait_for("testHelpers.field('Network')?.selectedOptions[0]?.textContent.startsWith('lan')");
    page.wait_for("testHelpers.field('Image')?.selectedOptions[0]?.textContent.startsWith('debian-12')");
    page.fill("Name", "not a label!");
    page.click("Create");
    page.wait_for("document.querySelector('.field.failed input[name=name]')");
    page.fill("Name", "web-1");
    page.screenshot("create-instance");
    page.click("Create");
    page.wait_for("document.querySelector('h1')?.textContent === 'web-1'");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'on'");

    page.click("Power off");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'off'");
    page.click("Power on");
    page.wait_for("document.querySelector('.heading .state')?.textContent === 'on'");
    page.click("Agent");
    page.wait_for(
        "document.querySelector('form.command') && \
         !document.body.innerText.includes('Commands wait until it is ready')",
    );
    // Simulated terminals run until they are interrupted: the output arrives before the command ends.
    page.fill("Command line", "top");
    page.click("Run");
    page.wait_for(
        "document.querySelector('pre[aria-label=output]')?.textContent === 'top in dumb\\n50 200\\n'",
    );
    page.wait_for_text("executing");
    page.click("Stop");
    page.wait_for_text("exit code 130");
    page.fill("Command line", "echo hello");
    page.click("Run in background");
    page.wait_for_text("exit code 0");
    page.click("Summary");
    page.wait_for("document.querySelectorAll('.history li').length > 3");
    page.screenshot("instance");

    page.click("Delete");
    page.wait_for_text("the instance web-1 of the namespace system");
    assert_eq!(page.evaluate("testHelpers.control('Delete')"), Value::Null, "the name is not typed yet");
    page.fill("Type web-1 to confirm", "web-1");
    page.click("Delete");
    page.wait_for_text("There are no instances yet.");
    assert_eq!(page.evaluate("document.querySelectorAll('dialog').length"), json!(0));
    page.check();
}

#[test]
fn shows_changes_made_elsewhere_within_a_second_as_text() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for("document.querySelector('.live.live')");
    page.load("/ui/#/networks");
    page.wait_for_text("There are no networks.");
    let mut delays = vec![];
    for attempt in 0..ATTEMPTS {
        let name = format!("{attempt}{HOSTILE}");
        page.evaluate(&format!("testHelpers.watch({})", json!(name)));
        let changed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let body = json!({ "name": name, "netblock": format!("10.0.{attempt}.0/24") });
        server.post("/networks", body);
        page.wait_for("window.seenAt");
        let seen = Duration::from_millis(page.evaluate("window.seenAt").as_u64().unwrap());
        delays.push(seen.saturating_sub(changed));
        if delays.last().unwrap() < &MAX_DELAY {
            break;
        }
    }
    eprintln!("changes appeared after {delays:?}");
    assert!(delays.last().unwrap() < &MAX_DELAY, "{delays:?}");

    let network = server.call(Method::GET, "/networks", None)[0]["uuid"].as_str().unwrap().to_owned();
    let item = json!({ "key": "note", "value": format!("{HOSTILE}<script>document.title='owned'</script>") });
    server.post(&format!("/networks/{network}/metadata"), item);
    page.load(&format!("/ui/#/networks/{network}"));
    page.wait_for(&format!("document.body.innerText.split({}).length > 2", json!(HOSTILE)));
    page.load("/ui/#/events");
    page.wait_for("document.querySelectorAll('.events > li').length > 3");
    page.load("/ui/#/networks?view=topology");
    page.wait_for("document.querySelector('.topology')");
    assert_eq!(page.evaluate("document.querySelectorAll('main img, main script').length"), json!(0));
    assert!(page.evaluate("document.title") != "owned");
    page.check();
}

#[test]
fn shows_other_users_only_their_namespace() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    for name in ["alpha", "beta"] {
        let body = json!({ "namespace": name, "key_name": "k", "key": format!("secret of {name}") });
        server.post("/auth/namespaces", body);
        let network = json!({ "name": format!("{name}-lan"), "netblock": "10.0.0.0/24", "namespace": name });
        server.post("/networks", network);
    }
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load("/ui/");
    page.fill("Namespace", "alpha");
    page.fill("Key", "wrong");
    page.click("Log in");
    page.wait_for("document.querySelector('.failure .request-id code')");
    page.fill("Key", "secret of alpha");
    page.click("Log in");
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");
    page.load("/ui/#/networks");
    page.wait_for_text("alpha-lan");
    assert_eq!(page.evaluate("document.body.innerText.includes('beta')"), json!(false));
    assert_eq!(page.evaluate("Boolean(testHelpers.control('Nodes'))"), json!(false));
    page.click("Log out");
    page.wait_for("testHelpers.field('Key')");
    page.check();
}

#[test]
fn produces_screenshots_of_a_busy_cluster() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    for image in ["debian-12", "ubuntu-24.04"] {
        upload_image(&server, image);
    }
    let networks = [("lan", "10.0.0.0/24"), ("dmz", "10.0.1.0/24"), ("storage", "10.0.2.0/24")]
        .map(|(name, netblock)| server.create_network(name, netblock));
    let names = ["web", "db", "cache", "build", "proxy", "queue", "worker", "mail"];
    for (index, name) in (0..18).zip(names.into_iter().cycle()) {
        let network = &networks[index % networks.len()];
        let base = ["sf://upload/system/debian-12", "sf://upload/system/ubuntu-24.04"][index % 2];
        let body = json!({ "name": format!("{name}-{}", index / names.len() + 1), "cpus": 1 + index % 2,
            "memory": 512 << (index % 3), "disk": [{ "base": base, "size": 8 }],
            "network": [{ "network_uuid": network, "float": index % 6 == 0 }], "metadata": { "team": "shop" } });
        server.post("/instances", body);
    }
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.prefer("light");
    page.load(&server.login_path());
    page.wait_for("/18\\s*of 18/.test(document.querySelector('.stats')?.innerText)");
    let instances = server.call(Method::GET, "/instances", None);
    for instance in &instances.as_array().unwrap()[..3] {
        server.post(&format!("/instances/{}/rebootsoft", instance["uuid"].as_str().unwrap()), json!({}));
    }
    page.wait_for("document.querySelectorAll('.events > li').length > 3");
    page.screenshot("overview");
    page.prefer("dark");
    page.load("/ui/#/instances");
    page.wait_for("document.querySelectorAll('.vtable .row canvas.thumbnail').length === 18");
    page.screenshot("instances");
    page.load("/ui/#/networks?view=topology");
    page.wait_for("document.querySelectorAll('.topology a').length > 18");
    page.screenshot("topology");
    page.prefer("light");
    page.press("k", 75, 2);
    page.fill("Page, object or action", "web");
    page.wait_for("document.querySelectorAll('[role=option]').length > 1");
    page.screenshot("palette");
    page.check();
    drop(page);

    let mut phone = browser.open(&server.daemon.url, (390, 780));
    phone.load(&server.login_path());
    phone.wait_for("document.querySelector('.live')");
    phone.load("/ui/#/instances");
    phone.wait_for("document.querySelectorAll('.vtable .row').length > 5");
    phone.screenshot("phone");
    for (route, text) in [
        ("#/instances", "web-1"),
        ("#/nodes/sim-1", "Started"),
        ("#/namespaces/system?tab=webhooks", "No webhooks."),
        ("#/issuers", "No issuer"),
    ] {
        phone.show(route, text);
        let overflow = phone.evaluate("document.documentElement.scrollWidth - innerWidth");
        assert!(overflow.as_i64().unwrap() <= 0, "{route} is {overflow} pixels wider than the phone");
    }
    phone.check();
}
