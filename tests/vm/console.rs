//! The serial console of a guest.

use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use crate::TIMEOUT;

/// A connection to a serial console.
pub(crate) struct Console {
    input: Box<dyn Write + Send>,
    receiver: Receiver<Vec<u8>>,
    /// All output so far, and the end of the last match in it.
    text: String,
    matched: usize,
    commands: u32,
}

impl Console {
    pub(crate) fn new(input: impl Write + Send + 'static, mut output: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(size @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..size].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { input: Box::new(input), receiver, text: String::new(), matched: 0, commands: 0 }
    }

    /// Waits for the next occurrence of a text and returns the output before it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let started = Instant::now();
        loop {
            if let Some(at) = self.text[self.matched..].find(text) {
                let before = self.text[self.matched..self.matched + at].to_owned();
                self.matched += at + text.len();
                return before;
            }
            match self.receiver.recv_timeout(TIMEOUT.saturating_sub(started.elapsed())) {
                // Telnet negotiation is not ASCII.
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

    /// Returns all output so far.
    pub(crate) fn output(&self) -> &str {
        &self.text
    }

    /// Types a line.
    pub(crate) fn type_line(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Waits for the login prompt, logs in, and returns the output before the prompt.
    pub(crate) fn log_in(&mut self) -> String {
        let before = self.wait_for(" login: ");
        self.type_line("root");
        self.wait_for("# ");
        before
    }

    /// Runs a command in the guest's shell and returns its output.
    pub(crate) fn run(&mut self, command: &str) -> String {
        self.commands += 1;
        let end = format!("end-of-{}", self.commands);
        // The quotes distinguish the echoed command from its output.
        self.type_line(&format!("echo \"be\"gin; {command}; echo \"e\"{}", &end[1..]));
        self.wait_for("begin\r\n");
        self.wait_for(&end).replace('\r', "")
    }

    /// Repeats a command in the guest until it succeeds and returns its output.
    pub(crate) fn run_until(&mut self, command: &str) -> String {
        self.run(&format!("until {command}; do usleep 50000; done"))
    }
}
