//! What a guest's agent and its host say to each other over the serial port `sf-agent`: protocol 1, and what this agent
//! adds to it.
//!
//! Every packet is a JSON object in a [`frame`]. It has a `command`; a request has a `unique`, which its replies repeat.
//! An agent names what it can beyond the protocol in `features`, a list of words in `agent-start` and in
//! `is-system-running-response`; a host that finds none there speaks the plain protocol, and so does this agent with a
//! host that asks for none of it.
//!
//! | Feature | What it adds |
//! |---|---|
//! | [`MEMORY`] | `execute` may have a `key`. The agent starts a command once for a key, keeps its result in the guest until `forget`, and answers every `execute` with that key when the command has ended, or at once if it has; `result` false and `reason` `cancelled` if somebody cancelled it meanwhile. With `again` set it starts nothing: `execute-response` then has `result` false and `reason` `unknown` (never heard of) or `lost` (it ran when the agent was ended). The response to an `execute` with a key has `key`, and instead of `stdout` and `stderr` it has `stdout-size`, `stderr-size` and, if more was written than is kept, `stdout-cut`, `stderr-cut`. `read-output` (`key`, `name` `stdout` or `stderr`, `offset`, `length` of at most [`PIECE`]) → `read-output-response` (`offset`, `encoding` `base64`, `chunk`, empty at the end). `cancel` (`key`) → `cancel-response`: ends the command and all that it started, and forgets it. `forget` (`key`) → `forget-response`. |
//! | [`PIECES`] | `chunk` of `put-file` and `get-file-response` may hold up to [`PIECE`] bytes. A `put-file` is written beside its place, and put there when it is whole. If its first packet has `pieces` true, a `put-file-response` with `offset`, the bytes written by now, follows each piece, and the one with `path` and without `offset` the last; without a `mode` in `stat_result` a file that was there keeps its own. `get-file` may have a `window`: so many bytes are sent, then more after each `get-file-more` (`unique` of the `get-file`, `offset` up to which the host has read). `abandon` (`unique` of a `put-file` or `get-file`) ends it and removes what it left; nothing answers. |
//!
//! `agent-start` and `is-system-running-response` also have `boot-id`, which is another one after each boot.

pub mod frame;
pub mod mode;
pub mod packet;

/// The agent remembers commands by their key.
pub const MEMORY: &str = "memory";
/// The agent moves files in large pieces, whole or not at all, and as fast as the other side takes them.
pub const PIECES: &str = "pieces";
/// The largest piece of a file or of output, in bytes.
pub const PIECE: usize = 64 << 10;
