//! The subset of the Telnet protocol that the port of a serial console needs: both directions become 8-bit clean, and
//! the guest echoes.

const SUBNEGOTIATION_END: u8 = 240;
const SUBNEGOTIATION: u8 = 250;
const WILL: u8 = 251;
const WONT: u8 = 252;
const DO: u8 = 253;
const DONT: u8 = 254;
/// Starts a command; an escaped `IAC` is sent twice.
const IAC: u8 = 255;

/// 8-bit clean transmission.
const BINARY: u8 = 0;
/// The server echoes what is typed.
const ECHO: u8 = 1;
/// Full-duplex transmission.
const SUPPRESS_GO_AHEAD: u8 = 3;

/// The options that the server sends first.
pub(super) const GREETING: [u8; 12] =
    [IAC, WILL, ECHO, IAC, WILL, SUPPRESS_GO_AHEAD, IAC, WILL, BINARY, IAC, DO, BINARY];

/// The position of a decoder in the stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum DecoderState {
    #[default]
    Data,
    /// After an `IAC`.
    Command,
    /// After `WILL`, `WONT`, `DO` or `DONT`: an option follows.
    Option,
    /// In a subnegotiation.
    Subnegotiation,
    /// After an `IAC` in a subnegotiation.
    SubnegotiationCommand,
}

/// Removes the protocol from the bytes of a client. Input may be split anywhere.
#[derive(Debug, Default)]
pub(super) struct TelnetDecoder(DecoderState);

impl TelnetDecoder {
    /// Returns the data in received bytes. Responses to the greeting and other requests are ignored.
    pub(super) fn decode(&mut self, bytes: &[u8]) -> Vec<u8> {
        use DecoderState::{Command, Data, Option, Subnegotiation, SubnegotiationCommand};
        let mut data = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            self.0 = match (self.0, byte) {
                (Data, IAC) => Command,
                (Data, byte) => {
                    data.push(byte);
                    Data
                }
                (Command, IAC) => {
                    data.push(IAC);
                    Data
                }
                (Command, WILL | WONT | DO | DONT) => Option,
                (Command, SUBNEGOTIATION) => Subnegotiation,
                (Command | Option, _) => Data,
                (Subnegotiation, IAC) => SubnegotiationCommand,
                (SubnegotiationCommand, SUBNEGOTIATION_END) => Data,
                (Subnegotiation | SubnegotiationCommand, _) => Subnegotiation,
            };
        }
        data
    }
}

/// Encodes data for a client.
pub(super) fn encode(data: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(data.len());
    for &byte in data {
        encoded.push(byte);
        if byte == IAC {
            encoded.push(IAC);
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_commands_split_anywhere() {
        let stream: &[u8] = &[
            b'a',
            IAC,
            DO,
            ECHO,
            b'b',
            IAC,
            SUBNEGOTIATION,
            24,
            b'x',
            IAC,
            IAC,
            IAC,
            SUBNEGOTIATION_END,
            IAC,
            IAC,
            IAC,
            241,
            b'c',
        ];
        let expected = [b'a', b'b', IAC, b'c'];
        assert_eq!(TelnetDecoder::default().decode(stream), expected);
        let mut decoder = TelnetDecoder::default();
        let bytewise: Vec<u8> = stream.iter().flat_map(|byte| decoder.decode(&[*byte])).collect();
        assert_eq!(bytewise, expected);
    }

    #[test]
    fn data_survives_both_directions() {
        let data: Vec<u8> = (0..=255).collect();
        assert_eq!(TelnetDecoder::default().decode(&encode(&data)), data);
    }
}
