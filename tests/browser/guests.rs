//! A real guest, from the upload of its image to its deletion.

use muster_test_cluster::{enter_vm_namespaces, single_vm_host, tiny_image};
use serde_json::json;

use crate::DESKTOP;
use crate::chromium::{Browser, Page};

/// The text of the terminal.
const TERMINAL_TEXT: &str = "(document.querySelector('.xterm-rows')?.innerText ?? '')";

#[test]
fn boots_in_both_consoles_from_upload_to_deletion() {
    if !enter_vm_namespaces("guests::boots_in_both_consoles_from_upload_to_deletion") {
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

    upload(&mut page);
    page.load("/ui/#/instances/new");
    page.wait_for("testHelpers.select('Image')");
    page.evaluate(
        "(() => {
            const image = testHelpers.field('Image');
            image.value = [...image.options].find((one) => one.textContent.startsWith('uploaded')).value;
            image.dispatchEvent(new Event('change', { bubbles: true }));
        })()",
    );
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

    page.click("Instance");
    page.click("Agent");
    page.wait_for(
        "document.querySelector('form.command') && \
         !document.body.innerText.includes('Commands wait until it is ready')",
    );
    page.fill("Command line", "echo from-$((40 + 2))");
    page.click("Run");
    page.wait_for("document.querySelector('pre[aria-label=output]')?.textContent.includes('from-42')");
    page.wait_for_text("exit code 0");

    page.click("Delete");
    page.fill("Type guest to confirm", "guest");
    page.click("Delete");
    page.wait_for_text("There are no instances yet.");
    page.show("#/artifacts", "uploaded");
    page.click("uploaded");
    page.wait_for("document.querySelector('h1')?.textContent === 'uploaded'");
    page.click("Delete");
    page.wait_for("document.querySelector('dialog .doomed')?.innerText.includes('version 1')");
    page.click("Delete");
    page.wait_for("document.querySelector('h1')?.textContent === 'Artifacts'");
    page.check();
    drop(page);
    drop(browser);
    assert_eq!(host.get("/instances"), json!([]));
}

/// Uploads the tiny image as `uploaded`: pauses after the first part, and resumes.
fn upload(page: &mut Page<'_>) {
    let limit = |bytes_per_second: i64| json!({ "offline": false, "latency": 0, "downloadThroughput": -1, "uploadThroughput": bytes_per_second });
    page.call("Network.emulateNetworkConditions", &limit(4 << 20));
    page.load("/ui/#/artifacts?add=1");
    page.wait_for("document.querySelector('dialog input[type=file]')");
    let input = page.call(
        "Runtime.evaluate",
        &json!({ "expression": "document.querySelector('dialog input[type=file]')" }),
    );
    let image = tiny_image().canonicalize().unwrap();
    let files = json!({ "files": [image], "objectId": input["result"]["objectId"] });
    page.call("DOM.setFileInputFiles", &files);
    page.fill("Name", "uploaded");
    page.click("Upload");
    let sent = "document.querySelector('dialog progress')?.value";
    page.wait_for(&format!("{sent} > 0"));
    page.click("Pause");
    page.wait_for("testHelpers.control('Resume')");
    let bytes = page.evaluate(sent).as_u64().unwrap();
    assert!(bytes > 0 && bytes < image.metadata().unwrap().len(), "interrupted after {bytes} bytes");
    page.call("Network.emulateNetworkConditions", &limit(-1));
    page.click("Resume");
    page.wait_for("testHelpers.control('uploaded')");
    page.click("Close");
}
