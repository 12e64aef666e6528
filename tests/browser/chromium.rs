//! Headless Chromium, driven by its DevTools protocol over a pipe.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::TIMEOUT;

/// The script that finds controls by their accessible names.
const HELPERS: &str = include_str!("helpers.js");
const PROGRAM: &str = "/usr/bin/chromium";

/// A running browser. It exits when the pipe closes, so it does not outlive the test process.
pub(crate) struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    events: Vec<Value>,
    next_id: u64,
    _profile: TempDir,
}

impl Browser {
    /// Starts the browser, or reports that the test is skipped.
    pub(crate) fn start() -> Option<Self> {
        if !Path::new(PROGRAM).exists() {
            muster_testing::skipped("the package chromium");
            return None;
        }
        let profile = tempfile::tempdir().unwrap();
        // The browser reads commands from descriptor 3 and writes messages to descriptor 4.
        let line = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null";
        let mut child = Command::new("/bin/sh")
            .args(["-c", line, PROGRAM, "--headless=new", "--remote-debugging-pipe", "--no-first-run"])
            // Tests run as root, which the sandbox of the browser does not support.
            .args([
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
            ])
            .args(["--disable-component-update", "--disable-sync", "--no-proxy-server", "--mute-audio"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|size| size > 0) {
                let value = serde_json::from_slice(message.strip_suffix(b"\0").unwrap_or(&message));
                if value.is_ok_and(|value| sender.send(value).is_err()) {
                    break;
                }
                message.clear();
            }
        });
        Some(Self { child, input, messages, events: vec![], next_id: 0, _profile: profile })
    }

    /// Sends a command and returns its result.
    fn call(&mut self, session: Option<&str>, method: &str, parameters: &Value) -> Value {
        self.next_id += 1;
        let mut message = json!({ "id": self.next_id, "method": method, "params": parameters });
        if let Some(session) = session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.input.write_all(&bytes).unwrap();
        let started = Instant::now();
        loop {
            let message = self.receive(TIMEOUT.saturating_sub(started.elapsed()));
            let message = message.unwrap_or_else(|| panic!("the browser does not answer {method}"));
            if message["id"] == json!(self.next_id) {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    fn receive(&mut self, timeout: Duration) -> Option<Value> {
        match self.messages.recv_timeout(timeout) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("the browser exited"),
        }
    }

    /// Opens an empty page of its own browser context, with a size in pixels.
    pub(crate) fn open(&mut self, server: &str, (width, height): (u32, u32)) -> Page<'_> {
        let context = self.call(None, "Target.createBrowserContext", &json!({}));
        let context = &context["browserContextId"];
        let target = json!({ "url": "about:blank", "browserContextId": context });
        let target = self.call(None, "Target.createTarget", &target);
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session =
            self.call(None, "Target.attachToTarget", &attach)["sessionId"].as_str().unwrap().to_owned();
        let (context, server) = (context.clone(), server.to_owned());
        let mut page = Page { browser: self, context, session, server };
        for domain in ["Page", "Runtime", "Network", "Log"] {
            page.call(&format!("{domain}.enable"), &json!({}));
        }
        page.call("Page.addScriptToEvaluateOnNewDocument", &json!({ "source": HELPERS }));
        let phone = width < 600;
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone });
        page.call("Emulation.setDeviceMetricsOverride", &metrics);
        page
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One page, which is closed with its connections when this is dropped.
pub(crate) struct Page<'a> {
    browser: &'a mut Browser,
    /// The id of its browser context.
    context: Value,
    session: String,
    server: String,
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        // The browser of a failed test may not answer.
        if !std::thread::panicking() {
            let context = json!({ "browserContextId": self.context });
            self.browser.call(None, "Target.disposeBrowserContext", &context);
        }
    }
}

impl Page<'_> {
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        let session = self.session.clone();
        self.browser.call(Some(&session), method, parameters)
    }

    /// Loads a path of the server.
    pub(crate) fn load(&mut self, path: &str) {
        let url = format!("{}{path}", self.server);
        self.call("Page.navigate", &json!({ "url": url }));
    }

    /// Shows another page of the UI, and waits until a text is in its content.
    pub(crate) fn show(&mut self, route: &str, text: &str) {
        self.load(&format!("/ui/{route}"));
        // A change of the fragment alone does not load the page again.
        let content = "document.querySelector('main')?.innerText";
        self.wait_for(&format!("location.hash === {} && {content}.includes({})", json!(route), json!(text)));
    }

    /// Evaluates an expression and returns its value.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true,
            "allowUnsafeEvalBlockedByCSP": false });
        let result = self.call("Runtime.evaluate", &parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait_for(&mut self, expression: &str) {
        let started = Instant::now();
        while self.evaluate(&format!("Boolean({expression})")) != json!(true) {
            if started.elapsed() > TIMEOUT {
                let text = self.evaluate("document.body.innerText");
                panic!(
                    "timed out waiting for {expression}; unfinished requests: {:?}; the page shows:\n{}",
                    self.unfinished_urls(),
                    text.as_str().unwrap_or_default()
                );
            }
            muster_testing::wait(Duration::from_millis(30));
        }
    }

    /// Waits until the page contains a text.
    pub(crate) fn wait_for_text(&mut self, text: &str) {
        self.wait_for(&format!("document.body?.innerText.includes({})", json!(text)));
    }

    /// Clicks the button or link with an accessible name.
    pub(crate) fn click(&mut self, name: &str) {
        self.wait_for(&format!("testHelpers.click({})", json!(name)));
    }

    /// Clicks a place of the window, in pixels.
    pub(crate) fn click_at(&mut self, x: u32, y: u32) {
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", &event);
        }
    }

    /// Replaces the value of the control with a label.
    pub(crate) fn fill(&mut self, label: &str, text: &str) {
        self.wait_for(&format!("testHelpers.select({})", json!(label)));
        self.type_text(text);
    }

    /// Types text at the focus.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", &json!({ "text": text }));
    }

    /// Presses a key at the focus.
    pub(crate) fn press(&mut self, key: &str, code: u32, modifiers: u32) {
        self.press_code(key, key, code, modifiers);
    }

    /// Presses a key at the focus, with the name of its place on the keyboard.
    pub(crate) fn press_code(&mut self, key: &str, place: &str, code: u32, modifiers: u32) {
        for kind in ["rawKeyDown", "keyUp"] {
            let text = if key == "Enter" && kind == "rawKeyDown" { "\r" } else { "" };
            let kind = if text.is_empty() { kind } else { "keyDown" };
            let event = json!({ "type": kind, "key": key, "code": place, "windowsVirtualKeyCode": code,
                "modifiers": modifiers, "text": text });
            self.call("Input.dispatchKeyEvent", &event);
        }
    }

    /// Selects the color scheme that the page sees as the preference of the system.
    pub(crate) fn prefer(&mut self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// Writes a screenshot to `target/screenshots`.
    pub(crate) fn screenshot(&mut self, name: &str) {
        self.evaluate("testHelpers.settle()");
        let image = self.call("Page.captureScreenshot", &json!({ "format": "png" }));
        let bytes = STANDARD.decode(image["data"].as_str().unwrap()).unwrap();
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/screenshots"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{name}.png")), bytes).unwrap();
    }

    /// Checks what the page has done so far: no error in its console, no request to another server.
    pub(crate) fn check(&mut self) {
        // Events that arrived before this answer are known afterwards.
        self.evaluate("1");
        let own = |event: &&Value| event["sessionId"] == json!(self.session);
        for event in self.browser.events.iter().filter(own) {
            let (method, parameters) = (event["method"].as_str().unwrap_or_default(), &event["params"]);
            match method {
                "Runtime.exceptionThrown" => panic!("the page threw an exception: {parameters}"),
                "Runtime.consoleAPICalled" => {
                    assert!(parameters["type"] != "error" && parameters["type"] != "assert", "{parameters}");
                }
                "Log.entryAdded" => {
                    let entry = &parameters["entry"];
                    // The browser logs every response with an error status, which tests cause deliberately.
                    let expected = entry["source"] == "network" && is_error_status(&entry["text"]);
                    assert!(entry["level"] != "error" || expected, "{entry}");
                }
                "Network.requestWillBeSent" => {
                    let url = parameters["request"]["url"].as_str().unwrap();
                    let local = url.starts_with("blob:") || url.starts_with("data:");
                    assert!(local || url.starts_with(&self.server), "a request leaves the server: {url}");
                }
                "Network.webSocketCreated" => {
                    let url = parameters["url"].as_str().unwrap().replacen("ws", "http", 1);
                    assert!(url.starts_with(&self.server), "a WebSocket leaves the server: {url}");
                }
                _ => {}
            }
        }
    }

    /// Returns the URLs of all requests so far.
    pub(crate) fn requested_urls(&mut self) -> Vec<String> {
        self.evaluate("1");
        let requests =
            self.browser.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        requests.map(|event| event["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the URLs of requests whose responses are not complete.
    fn unfinished_urls(&self) -> Vec<String> {
        let mut unfinished = BTreeMap::new();
        for event in &self.browser.events {
            let (parameters, id) = (&event["params"], event["params"]["requestId"].to_string());
            match event["method"].as_str().unwrap_or_default() {
                "Network.requestWillBeSent" => {
                    unfinished.insert(id, parameters["request"]["url"].to_string());
                }
                "Network.loadingFinished" | "Network.loadingFailed" => {
                    unfinished.remove(&id);
                }
                _ => {}
            }
        }
        unfinished.into_values().collect()
    }

    /// Returns the number of bytes that the server has sent to the page so far.
    pub(crate) fn received_bytes(&mut self) -> f64 {
        self.evaluate("1");
        let finished =
            self.browser.events.iter().filter(|event| event["method"] == "Network.loadingFinished");
        finished.map(|event| event["params"]["encodedDataLength"].as_f64().unwrap_or_default()).sum()
    }
}

fn is_error_status(text: &Value) -> bool {
    text.as_str().is_some_and(|text| {
        text.starts_with("Failed to load resource: the server responded with a status of")
    })
}
