//! The subset of the Telnet protocol that a serial console needs: option negotiation is removed from the stream and
//! answered. Both directions become 8-bit clean, and the server echoes.

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
/// The peer echoes what is typed.
const ECHO: u8 = 1;
/// Full-duplex transmission.
const SUPPRESS_GO_AHEAD: u8 = 3;

/// The parser's position in the stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ParserState {
    #[default]
    Data,
    /// After an `IAC`.
    Command,
    /// After `WILL`, `WONT`, `DO` or `DONT`: an option follows.
    Option(u8),
    /// In a subnegotiation, which is ignored.
    Subnegotiation,
    /// After an `IAC` in a subnegotiation.
    SubnegotiationCommand,
}

/// The state of a connection to a Telnet server. Input may be split anywhere.
#[derive(Debug, Default)]
pub(crate) struct Telnet {
    state: ParserState,
    /// Options that the peer has enabled.
    peer_options: Vec<u8>,
    /// Options that this side has enabled.
    local_options: Vec<u8>,
}

impl Telnet {
    /// Decodes received bytes: appends data to `data` and replies to negotiation to `reply`.
    pub(crate) fn decode(&mut self, bytes: &[u8], data: &mut Vec<u8>, reply: &mut Vec<u8>) {
        for &byte in bytes {
            self.state = match (self.state, byte) {
                (ParserState::Data, IAC) => ParserState::Command,
                (ParserState::Data, byte) => {
                    data.push(byte);
                    ParserState::Data
                }
                (ParserState::Command, IAC) => {
                    data.push(IAC);
                    ParserState::Data
                }
                (ParserState::Command, WILL | WONT | DO | DONT) => ParserState::Option(byte),
                (ParserState::Command, SUBNEGOTIATION) => ParserState::Subnegotiation,
                (ParserState::Command, _) => ParserState::Data,
                (ParserState::Option(verb), option) => {
                    if let Some(verb) = self.negotiate(verb, option) {
                        reply.extend([IAC, verb, option]);
                    }
                    ParserState::Data
                }
                (ParserState::Subnegotiation, IAC) => ParserState::SubnegotiationCommand,
                (ParserState::Subnegotiation, _) => ParserState::Subnegotiation,
                (ParserState::SubnegotiationCommand, SUBNEGOTIATION_END) => ParserState::Data,
                (ParserState::SubnegotiationCommand, _) => ParserState::Subnegotiation,
            };
        }
    }

    /// Returns the reply to an offer or a request. Only changes are answered, to prevent endless negotiation.
    fn negotiate(&mut self, verb: u8, option: u8) -> Option<u8> {
        let (enabled, supported, yes, no) = match verb {
            WILL | WONT => {
                let supported = matches!(option, BINARY | ECHO | SUPPRESS_GO_AHEAD);
                (&mut self.peer_options, supported, DO, DONT)
            }
            _ => (&mut self.local_options, matches!(option, BINARY | SUPPRESS_GO_AHEAD), WILL, WONT),
        };
        let is_enabled = enabled.contains(&option);
        match (matches!(verb, WILL | DO), is_enabled) {
            (true, false) if supported => {
                enabled.push(option);
                Some(yes)
            }
            (true, false) | (false, true) => {
                enabled.retain(|other| *other != option);
                Some(no)
            }
            (true, true) | (false, false) => None,
        }
    }

    /// Encodes bytes to send. Adds nothing after a carriage return: consoles are binary, so the guest would receive it.
    pub(crate) fn encode(bytes: &[u8]) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            encoded.push(byte);
            if byte == IAC {
                encoded.push(IAC);
            }
        }
        encoded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The options that QEMU sends when a client connects.
    const GREETING: [u8; 12] = [IAC, WILL, 1, IAC, WILL, 3, IAC, WILL, 0, IAC, DO, 0];

    fn decode(telnet: &mut Telnet, bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut data, mut reply) = (vec![], vec![]);
        telnet.decode(bytes, &mut data, &mut reply);
        (data, reply)
    }

    #[test]
    fn accepts_the_options_of_a_console_once() {
        let mut telnet = Telnet::default();
        let (data, reply) = decode(&mut telnet, &[&GREETING[..], b"login: "].concat());
        assert_eq!(data, b"login: ");
        assert_eq!(reply, [IAC, DO, 1, IAC, DO, 3, IAC, DO, 0, IAC, WILL, 0]);
        assert_eq!(decode(&mut telnet, &GREETING), (vec![], vec![]));
        assert_eq!(decode(&mut telnet, &[IAC, WONT, 1]).1, [IAC, DONT, 1]);
        assert!(decode(&mut telnet, &[IAC, WONT, 1]).1.is_empty());
    }

    #[test]
    fn declines_unsupported_options_each_time() {
        let mut telnet = Telnet::default();
        let requests = [IAC, DO, 24, IAC, WILL, 31, IAC, DONT, 24, IAC, DO, 24];
        assert_eq!(decode(&mut telnet, &requests).1, [IAC, WONT, 24, IAC, DONT, 31, IAC, WONT, 24]);
    }

    #[test]
    fn decodes_the_same_data_however_the_stream_is_split() {
        let stream = [
            &GREETING[..],
            b"a",
            &[IAC, IAC, IAC, SUBNEGOTIATION, 24, 1, IAC, IAC, IAC, SUBNEGOTIATION_END],
            b"b\r\n",
            &[IAC, 241, 0, 254],
        ]
        .concat();
        let expected = decode(&mut Telnet::default(), &stream);
        assert_eq!(expected.0, [&[b'a', IAC][..], b"b\r\n", &[0, 254]].concat());
        let (mut telnet, mut data, mut reply) = (Telnet::default(), vec![], vec![]);
        for byte in stream {
            telnet.decode(&[byte], &mut data, &mut reply);
        }
        assert_eq!((data, reply), expected);
    }

    #[test]
    fn encodes_only_iac() {
        assert_eq!(Telnet::encode(b"root\r"), b"root\r");
        assert_eq!(Telnet::encode(&[1, IAC, 2]), [1, IAC, IAC, 2]);
    }
}
