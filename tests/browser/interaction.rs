//! Keys, focus, input that must not be lost, and repeated requests.

use reqwest::Method;
use serde_json::{Value, json};

use crate::chromium::{Browser, Page};
use crate::{DESKTOP, Server};

const CTRL: u32 = 2;

/// Opens the UI and waits until its navigation is shown.
fn open<'a>(browser: &'a mut Browser, server: &Server) -> Page<'a> {
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&server.login_path());
    page.wait_for("document.querySelector('.shell')");
    page
}

#[test]
fn keys_and_focus_follow_the_user() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let network = server.create_network("lan", "10.0.0.0/24");
    let instance = server.create_instance("web", &network);
    let mut page = open(&mut browser, &server);
    // The first key after the page is shown.
    page.press("k", 75, CTRL);
    page.fill("Page, object or action", "networks");
    page.press("Enter", 13, 0);
    let is_focused = |heading: &str| {
        format!("document.activeElement.matches('h1') && document.activeElement.textContent === '{heading}'")
    };
    page.wait_for(&is_focused("Networks"));
    page.click("Instances");
    page.wait_for(&is_focused("Instances"));

    // A click beside a form loses no input; without input it closes the form.
    page.show("#/networks", "lan");
    let is_open = "Boolean(document.querySelector('dialog'))";
    page.click("Create network");
    page.fill("Name", "not lost");
    page.click_at(5, 5);
    assert_eq!(page.evaluate("testHelpers.field('Name').value"), json!("not lost"));
    page.click("Cancel");
    page.wait_for(&format!("!{is_open}"));
    page.click("Create network");
    page.wait_for(is_open);
    page.click_at(5, 5);
    page.wait_for(&format!("!{is_open}"));

    // Tab is a key of the guest, so another one leaves the console.
    page.load(&format!("/ui/#/instances/{instance}/console"));
    page.wait_for("document.activeElement?.matches('.xterm-helper-textarea')");
    page.press("Tab", 9, 0);
    assert_eq!(page.evaluate("document.activeElement.matches('.xterm-helper-textarea')"), json!(true));
    page.press_code("]", "BracketRight", 221, CTRL);
    page.wait_for("document.activeElement?.matches('.switch [aria-pressed=true]')");

    page.show("#/networks?view=topology", "Networks");
    page.wait_for("[...document.querySelectorAll('.topology text')].some((text) => /^Node sim-/.test(text.textContent))");
    page.check();
}

#[test]
fn repeats_a_request_whose_response_is_lost_without_executing_it_twice() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let mut page = open(&mut browser, &server);
    page.wait_for("document.querySelector('.live.live')");
    // The response of the first request never arrives.
    page.evaluate(
        "(() => {
            const send = window.fetch;
            window.keys = [];
            window.fetch = async (address, options) => {
                const response = await send(address, options);
                if (options.method === 'POST' && new URL(address).pathname === '/networks') {
                    window.keys.push(options.headers['Idempotency-Key']);
                    if (window.keys.length === 1) throw new TypeError('Failed to fetch');
                }
                return response;
            };
        })()",
    );
    page.load("/ui/#/networks?create=1");
    page.fill("Name", "once");
    page.fill("Netblock", "10.0.0.0/24");
    page.click("Create");
    page.wait_for("document.querySelector('h1')?.textContent === 'once'");
    assert_eq!(server.call(Method::GET, "/networks", None).as_array().unwrap().len(), 1);
    let keys = page.evaluate("window.keys");
    assert!(keys.as_array().unwrap().len() == 2 && keys[0] == keys[1] && keys[0].is_string(), "{keys}");

    // What cannot be read is an error, not an empty list.
    page.call("Network.setBlockedURLs", &json!({ "urls": ["*/instances?*"] }));
    page.load("/ui/#/events");
    page.evaluate("import('/ui/lib/live.js').then((live) => live.instances.load())");
    page.load("/ui/#/operations");
    page.wait_for("document.querySelector('section[aria-label=Running] .failure')");
}

#[test]
fn output_of_commands_is_appended() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let mut page = open(&mut browser, &server);
    let write = |parts: &Value| {
        format!(
            "import('/ui/lib/agent.js').then(({{ OutputWriter }}) => {{
                const element = document.createElement('pre');
                const writer = new OutputWriter(element);
                for (const part of {parts}) writer.write(part);
                return element.textContent;
            }})"
        )
    };
    for (parts, shown) in [
        (json!(["a", "b\nc"]), "ab\nc"),
        (json!(["one\r", "\ntwo\r\n"]), "one\ntwo\n"),
        (json!(["10 %\r", "20 %\r", "30 %"]), "30 %"),
        (json!(["\u{1b}[3", "1mred\u{1b}[0m\n"]), "red\n"),
        (json!(["<b>&amp;\n"]), "<b>&amp;\n"),
    ] {
        assert_eq!(page.evaluate(&write(&parts)), json!(shown), "{parts}");
    }
    // Nodes that are complete stay as they are, and old ones are removed.
    let long = page.evaluate(
        "import('/ui/lib/agent.js').then(({ OutputWriter }) => {
            const element = document.createElement('pre');
            const writer = new OutputWriter(element);
            writer.write('first line\\n');
            const first = element.firstChild;
            writer.write('second\\n');
            const isKept = first === element.firstChild && first.data === 'first line\\n';
            for (let line = 0; line < 30000; line++) writer.write(`line ${line}\\n`);
            return [isKept, element.textContent.length <= 200000, element.textContent.endsWith('line 29999\\n')];
        })",
    );
    assert_eq!(long, json!([true, true, true]));
    page.check();
}

#[test]
fn blob_gets_a_label_and_the_api_page_works_without_inline_styles() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    crate::simulated::upload_image(&server, "debian-12");
    let mut page = open(&mut browser, &server);
    page.show("#/artifacts", "debian-12");
    page.click("Blobs");
    page.wait_for("document.querySelector('.vtable .row')");
    page.evaluate("document.querySelector('.vtable .row a').click()");
    page.wait_for("document.querySelector('h1')?.textContent.startsWith('Blob ')");
    page.wait_for(
        "document.querySelector('section[aria-label=\"Used by\"] tbody a')?.textContent === 'debian-12'",
    );
    page.click("Label");
    page.fill("Label", "nightly");
    page.click("Label");
    page.wait_for("document.querySelector('h1')?.textContent.includes('nightly')");
    let label = server.call(Method::GET, "/label/nightly", None);
    assert_eq!(label["artifact_type"], "label", "{label}");

    page.load("/apidocs/");
    page.wait_for("document.querySelector('.opblock-summary-control')");
    page.evaluate("document.querySelector('.opblock-summary-control').click()");
    page.wait_for("document.querySelector('.opblock.is-open .responses-table')");
    page.check();
}

#[test]
fn interrupted_upload_continues() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    // Three parts.
    std::fs::write(file.path(), vec![7_u8; 10 << 20]).unwrap();
    let mut page = open(&mut browser, &server);
    page.load("/ui/#/artifacts?add=1");
    page.wait_for("document.querySelector('dialog input[type=file]')");
    // The second part is not sent before the upload was interrupted.
    page.evaluate(
        "(() => {
            const send = window.fetch;
            window.offsets = [];
            window.fetch = (address, options) => {
                const offset = new URL(address).searchParams.get('offset');
                if (offset !== null) window.offsets.push(Number(offset));
                if (window.offsets.length !== 2 || offset === null) return send(address, options);
                return new Promise((resolve, reject) => {
                    options.signal.addEventListener('abort', () => reject(options.signal.reason));
                });
            };
        })()",
    );
    let input = json!({ "expression": "document.querySelector('dialog input[type=file]')" });
    let input = page.call("Runtime.evaluate", &input)["result"]["objectId"].clone();
    page.call("DOM.setFileInputFiles", &json!({ "files": [file.path()], "objectId": input }));
    page.fill("Name", "uploaded");
    page.click("Upload");
    page.wait_for("window.offsets.length === 2");
    page.click("Pause");
    page.click("Resume");
    page.wait_for("testHelpers.control('uploaded')");
    assert_eq!(page.evaluate("window.offsets"), json!([0, 4 << 20, 4 << 20, 8 << 20]));
    let artifacts = server.call(Method::GET, "/artifacts", None);
    assert_eq!(artifacts[0]["blobs"]["1"]["size"], 10 << 20, "{artifacts}");
    page.check();
}
