//! The protocol between the guest agent and its host over the serial port `sf-agent`: protocol 1 and Muster's extensions.
//!
//! Every packet is a JSON object in a [`frame`]. It has a `command`; a request has a `unique`, which its replies repeat.
//! `agent-start` and `is-system-running-response` list the agent's extensions in `features` and have a `boot-id`, which
//! changes with every boot of the guest. A host that finds no `features` uses the plain protocol; the agent behaves
//! as a plain agent towards a host that uses no extension.
//!
//! # Feature `memory`
//!
//! The agent runs a command at most once per key and keeps its result in the guest until the host deletes it.
//!
//! - `execute` may have a `key`. If no command with this key exists, the agent starts it. In any case it replies when
//!   the command has ended, immediately if it already has.
//!   - With `again` set it never starts the command. If the key is not known, the reply has `result` false and `reason`
//!     `unknown`.
//!   - If the agent was stopped while the command ran, the reply has `result` false and `reason` `lost`.
//!   - If the command is cancelled meanwhile, the reply has `result` false and `reason` `cancelled`.
//!   - The reply has `key`. Instead of `stdout` and `stderr` it has `stdout-size` and `stderr-size`, and `stdout-cut` or
//!     `stderr-cut` if the output exceeded the limit.
//! - `read-output` (`key`, `name` `stdout` or `stderr`, `offset`, `length` of at most [`MAX_CHUNK_SIZE`]) →
//!   `read-output-response` (`offset`, `encoding` `base64`, `chunk`, which is empty at the end of the output).
//! - `cancel` (`key`) → `cancel-response`: terminates the command with all its descendants and deletes its result.
//! - `forget` (`key`) → `forget-response`: deletes the result.
//!
//! # Feature `pieces`
//!
//! - `chunk` of `put-file` and `get-file-response` may hold up to [`MAX_CHUNK_SIZE`] bytes.
//! - `put-file` writes a temporary file next to the target and renames it when it is complete. If the first packet has
//!   `pieces` true, every chunk is acknowledged by a `put-file-response` with `offset`, the number of bytes written so
//!   far; the response to the last packet has `path` and no `offset`. Without `mode` in `stat_result`, an existing file
//!   keeps its mode.
//! - `get-file` may have a `window`: the agent sends that many bytes and then waits for `get-file-more` (`unique` of the
//!   `get-file`, `offset` up to which the host has read) before it sends more.
//! - `abandon` (`unique` of a `put-file` or `get-file`) aborts the transfer and removes its temporary file. It has no
//!   reply.
//!
//! # Feature `terminal`
//!
//! - `terminal` (`command-line`, `term`, `rows`, `columns`, `window`) runs a command with a pseudo-terminal. All its replies
//!   are `terminal-response`: the first one has `result` true; output has `offset`, `encoding` `base64` and `chunk`; the
//!   last one has `return-code`. A session that fails ends with `command-error`. The following packets have the `unique` of
//!   the `terminal` and no reply of their own:
//! - `terminal-input` (`encoding` `base64`, `chunk`): typed bytes. The agent replies with `accepted`, the number of bytes
//!   that the terminal has accepted, after every [`TERMINAL_INPUT_ACKNOWLEDGEMENT`] bytes. A host that is more than
//!   [`MAX_TERMINAL_INPUT`] bytes ahead ends the session.
//! - `terminal-more` (`offset` up to which the host has read the output): the agent sends at most `window` bytes ahead of it.
//! - `terminal-resize` (`rows`, `columns`).
//! - `abandon` ends the session and terminates its processes, and so does the end of the connection.

pub mod frame;
pub mod mode;
pub mod packet;

pub use packet::MAX_CHUNK_SIZE;

/// The feature of agents that remember commands by key.
pub const FEATURE_MEMORY: &str = "memory";
/// The feature of agents that transfer files atomically, in large chunks and with flow control.
pub const FEATURE_PIECES: &str = "pieces";
/// The feature of agents that run commands with a pseudo-terminal.
pub const FEATURE_TERMINAL: &str = "terminal";
/// The maximum number of bytes of input that a terminal has not accepted.
pub const MAX_TERMINAL_INPUT: usize = 64 << 10;
/// The number of accepted bytes of input after which the agent acknowledges them.
pub const TERMINAL_INPUT_ACKNOWLEDGEMENT: usize = 16 << 10;
