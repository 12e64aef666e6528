//! The serial console of a guest: read, typed to, and used to run commands.

use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use crate::PATIENCE;

/// A connection to a console on which a test looks at one thing after the other.
pub(crate) struct Console {
    keys: Box<dyn Write + Send>,
    output: Receiver<Vec<u8>>,
    /// What it has shown, and how much of that the test has looked at.
    text: String,
    seen: usize,
    commands: u32,
}

impl Console {
    pub(crate) fn new(keys: impl Write + Send + 'static, mut screen: impl Read + Send + 'static) -> Self {
        let (send, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(size @ 1..) = screen.read(&mut buffer) {
                if send.send(buffer[..size].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { keys: Box::new(keys), output, text: String::new(), seen: 0, commands: 0 }
    }

    /// Waits until it shows a text after what was waited for before, and answers what came before it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let started = Instant::now();
        loop {
            if let Some(at) = self.text[self.seen..].find(text) {
                let before = self.text[self.seen..self.seen + at].to_owned();
                self.seen += at + text.len();
                return before;
            }
            match self.output.recv_timeout(PATIENCE.saturating_sub(started.elapsed())) {
                // What telnet says of itself is no text.
                Ok(bytes) => {
                    self.text.extend(bytes.into_iter().filter(u8::is_ascii).map(char::from));
                }
                Err(RecvTimeoutError::Timeout) => panic!("no {text:?} on the console:\n{}", self.text),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the guest ended without {text:?} on the console:\n{}", self.text)
                }
            }
        }
    }

    /// All that it has shown so far.
    pub(crate) fn shown(&self) -> &str {
        &self.text
    }

    /// Types a line.
    pub(crate) fn type_line(&mut self, line: &str) {
        self.keys.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Waits for the prompt, answers what was shown before it, and logs in.
    pub(crate) fn log_in(&mut self) -> String {
        let before = self.wait_for(" login: ");
        self.type_line("root");
        self.wait_for("# ");
        before
    }

    /// Runs a command in the guest's shell and answers what it printed.
    pub(crate) fn run(&mut self, command: &str) -> String {
        self.commands += 1;
        let end = format!("end-of-{}", self.commands);
        // The quotes are gone from what the shell prints, but not from the echo of what was typed.
        self.type_line(&format!("echo \"be\"gin; {command}; echo \"e\"{}", &end[1..]));
        self.wait_for("begin\r\n");
        self.wait_for(&end).replace('\r', "")
    }

    /// Runs a command in the guest until it succeeds, and answers what it printed then.
    pub(crate) fn run_until(&mut self, command: &str) -> String {
        self.run(&format!("until {command}; do usleep 50000; done"))
    }
}
