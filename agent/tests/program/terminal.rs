//! Commands with a pseudo-terminal.

use serde_json::{Value, json};

use crate::host::{Host, decode};

const WINDOW: u64 = 64 << 10;

struct Terminal {
    unique: Value,
    output: Vec<u8>,
}

impl Terminal {
    fn open(host: &mut Host, line: &str) -> Self {
        let unique = host.request(json!({
            "command": "terminal", "command-line": line, "term": "vt100", "rows": 24, "columns": 80, "window": WINDOW,
        }));
        let reply = host.reply(&unique);
        assert_eq!(
            (&reply["command"], &reply["result"]),
            (&json!("terminal-response"), &json!(true)),
            "{reply}"
        );
        Self { unique, output: vec![] }
    }

    fn send(&self, host: &mut Host, command: &str, mut fields: Value) {
        fields["command"] = command.into();
        fields["unique"] = self.unique.clone();
        host.send(&fields);
    }

    fn type_text(&self, host: &mut Host, text: &str) {
        let chunk = muster_agent::packet::encode_chunk(text.as_bytes());
        self.send(host, "terminal-input", json!({ "chunk": chunk }));
    }

    /// Reads the next packet. Returns the exit code if it is the last one.
    fn receive(&mut self, host: &mut Host) -> Option<i64> {
        let reply = host.reply(&self.unique);
        assert_eq!(reply["command"], "terminal-response", "{reply}");
        if let Some(offset) = reply["offset"].as_u64() {
            assert_eq!(offset, self.output.len() as u64);
            self.output.extend(decode(&reply["chunk"]));
        }
        reply["return-code"].as_i64()
    }

    fn wait_for(&mut self, host: &mut Host, text: &str) {
        while !String::from_utf8_lossy(&self.output).contains(text) {
            assert_eq!(self.receive(host), None, "{}", String::from_utf8_lossy(&self.output));
        }
    }

    /// Reads to the end, and returns the output and the exit code.
    fn finish(mut self, host: &mut Host) -> (String, i64) {
        loop {
            if let Some(code) = self.receive(host) {
                return (String::from_utf8_lossy(&self.output).into_owned(), code);
            }
            let offset = self.output.len();
            self.send(host, "terminal-more", json!({ "offset": offset }));
        }
    }
}

#[test]
fn command_has_a_terminal_with_input_size_and_exit_code() {
    let mut host = Host::new();
    let mut terminal = Terminal::open(
        &mut host,
        "test -t 0 && test -t 2 && tty && echo $TERM; stty size; read x; stty size; exit 7",
    );
    terminal.wait_for(&mut host, "24 80\r\n");
    terminal.send(&mut host, "terminal-resize", json!({ "rows": 50, "columns": 132 }));
    terminal.type_text(&mut host, "x\r");
    let (output, code) = terminal.finish(&mut host);
    assert_eq!(code, 7);
    assert!(output.starts_with("/dev/pts/") && output.contains("\r\nvt100\r\n"), "{output}");
    assert!(output.ends_with("50 132\r\n"), "{output}");
}

#[test]
fn interrupt_key_reaches_the_foreground_process() {
    let mut host = Host::new();
    let line = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done";
    let mut terminal = Terminal::open(&mut host, line);
    terminal.wait_for(&mut host, "ready");
    terminal.type_text(&mut host, "\u{3}");
    let (output, code) = terminal.finish(&mut host);
    assert!(output.contains("caught"), "{output}");
    assert_eq!(code, 3);
}

#[test]
fn long_output_is_sent_within_the_window_and_completely() {
    let mut host = Host::new();
    let mut terminal = Terminal::open(&mut host, "seq 1 50000");
    while (terminal.output.len() as u64) < WINDOW {
        assert_eq!(terminal.receive(&mut host), None);
    }
    assert_eq!(terminal.output.len() as u64, WINDOW);
    // Other requests are answered meanwhile.
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    let offset = terminal.output.len();
    terminal.send(&mut host, "terminal-more", json!({ "offset": offset }));
    let (output, code) = terminal.finish(&mut host);
    let expected: String = (1..=50_000).map(|number| format!("{number}\r\n")).collect();
    assert!(output == expected && code == 0, "{} bytes, code {code}", output.len());
}

#[test]
fn abandoned_session_and_lost_host_terminate_its_processes() {
    let mut host = Host::new();
    for reconnect in [false, true] {
        let marker = host.path_text(&format!("pid-{reconnect}"));
        let line = format!("trap '' HUP; sleep 600 & echo $! >{marker}; echo started; wait");
        let mut terminal = Terminal::open(&mut host, &line);
        terminal.wait_for(&mut host, "started");
        let pid = std::fs::read_to_string(&marker).unwrap();
        if reconnect {
            host.reconnect();
        } else {
            terminal.send(&mut host, "abandon", json!({}));
        }
        // The command ends when the process has exited.
        let wait = format!("while kill -0 {}; do sleep 0.05; done 2>/dev/null; echo ended", pid.trim());
        assert_eq!(host.execute(&wait)["stdout"], "ended\n");
    }
}

#[test]
fn sessions_and_unread_input_are_limited() {
    let mut host = Host::new();
    let terminals: Vec<_> =
        (0..16).map(|_| Terminal::open(&mut host, "stty raw -echo; echo go; sleep 600")).collect();
    let refused = host.call(json!({
        "command": "terminal", "command-line": "true", "term": "vt100", "rows": 1, "columns": 1, "window": 1,
    }));
    assert_eq!(refused["message"], "too many concurrent terminals", "{refused}");
    let mut flooded = terminals.into_iter().next().unwrap();
    flooded.wait_for(&mut host, "go");
    let unique = flooded.unique.clone();
    for _ in 0..10 {
        flooded.type_text(&mut host, &"x".repeat(16 << 10));
    }
    let ended = host.reply(&unique);
    let ended = if ended["accepted"].is_u64() { host.reply(&unique) } else { ended };
    assert_eq!(ended["command"], "command-error", "{ended}");
}
