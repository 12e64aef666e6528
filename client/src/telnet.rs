//! As much of telnet as a serial console needs: what the other side says about itself is taken out of the stream and
//! answered. Both directions become plain bytes, and the other side echoes.

const SUBNEGOTIATION_END: u8 = 240;
const SUBNEGOTIATION: u8 = 250;
const WILL: u8 = 251;
const WONT: u8 = 252;
const DO: u8 = 253;
const DONT: u8 = 254;
/// What all commands begin with; twice it is itself.
const IAC: u8 = 255;

/// Every byte means itself.
const BINARY: u8 = 0;
/// The other side shows what is typed.
const ECHO: u8 = 1;
/// Nobody waits for permission to speak.
const SUPPRESS_GO_AHEAD: u8 = 3;

/// What the next byte belongs to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Data,
    /// After an `IAC`.
    Command,
    /// After one of `WILL`, `WONT`, `DO` and `DONT`: an option follows.
    Option(u8),
    /// Something about an option that nobody here asked for.
    Subnegotiation,
    /// After an `IAC` in that.
    SubnegotiationCommand,
}

/// A conversation with a telnet server. Pieces may end anywhere.
#[derive(Debug, Default)]
pub(crate) struct Telnet {
    place: Place,
    /// Options that the other side has, of those that it may have.
    theirs: Vec<u8>,
    /// Options that this side has.
    ours: Vec<u8>,
}

impl Telnet {
    /// Takes what arrived: appends what it shows to `shown`, and what is to be answered to `answer`.
    pub(crate) fn receive(&mut self, bytes: &[u8], shown: &mut Vec<u8>, answer: &mut Vec<u8>) {
        for &byte in bytes {
            self.place = match (self.place, byte) {
                (Place::Data, IAC) => Place::Command,
                (Place::Data, byte) => {
                    shown.push(byte);
                    Place::Data
                }
                (Place::Command, IAC) => {
                    shown.push(IAC);
                    Place::Data
                }
                (Place::Command, WILL | WONT | DO | DONT) => Place::Option(byte),
                (Place::Command, SUBNEGOTIATION) => Place::Subnegotiation,
                (Place::Command, _) => Place::Data,
                (Place::Option(verb), option) => {
                    if let Some(verb) = self.settle(verb, option) {
                        answer.extend([IAC, verb, option]);
                    }
                    Place::Data
                }
                (Place::Subnegotiation, IAC) => Place::SubnegotiationCommand,
                (Place::Subnegotiation, _) => Place::Subnegotiation,
                (Place::SubnegotiationCommand, SUBNEGOTIATION_END) => Place::Data,
                (Place::SubnegotiationCommand, _) => Place::Subnegotiation,
            };
        }
    }

    /// What to answer to an offer or a request. Only a change is answered, or two sides could answer each other for ever.
    fn settle(&mut self, verb: u8, option: u8) -> Option<u8> {
        let (held, welcome, yes, no) = match verb {
            WILL | WONT => {
                let welcome = matches!(option, BINARY | ECHO | SUPPRESS_GO_AHEAD);
                (&mut self.theirs, welcome, DO, DONT)
            }
            _ => (&mut self.ours, matches!(option, BINARY | SUPPRESS_GO_AHEAD), WILL, WONT),
        };
        let has = held.contains(&option);
        match (matches!(verb, WILL | DO), has) {
            (true, false) if welcome => {
                held.push(option);
                Some(yes)
            }
            (true, false) | (false, true) => {
                held.retain(|one| *one != option);
                Some(no)
            }
            (true, true) | (false, false) => None,
        }
    }

    /// What is sent for some bytes. Nothing is put after a carriage return: consoles are binary, and a guest would see
    /// whatever follows.
    pub(crate) fn send(bytes: &[u8]) -> Vec<u8> {
        let mut sent = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            sent.push(byte);
            if byte == IAC {
                sent.push(IAC);
            }
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What QEMU says first.
    const GREETING: [u8; 12] = [IAC, WILL, 1, IAC, WILL, 3, IAC, WILL, 0, IAC, DO, 0];

    fn receive(telnet: &mut Telnet, bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut shown, mut answer) = (vec![], vec![]);
        telnet.receive(bytes, &mut shown, &mut answer);
        (shown, answer)
    }

    #[test]
    fn what_a_console_offers_is_taken_once() {
        let mut telnet = Telnet::default();
        let (shown, answer) = receive(&mut telnet, &[&GREETING[..], b"login: "].concat());
        assert_eq!(shown, b"login: ");
        assert_eq!(answer, [IAC, DO, 1, IAC, DO, 3, IAC, DO, 0, IAC, WILL, 0]);
        assert_eq!(receive(&mut telnet, &GREETING), (vec![], vec![]));
        assert_eq!(receive(&mut telnet, &[IAC, WONT, 1]).1, [IAC, DONT, 1]);
        assert!(receive(&mut telnet, &[IAC, WONT, 1]).1.is_empty());
    }

    #[test]
    fn what_nobody_here_knows_is_declined_each_time_it_is_asked() {
        let mut telnet = Telnet::default();
        let asked = [IAC, DO, 24, IAC, WILL, 31, IAC, DONT, 24, IAC, DO, 24];
        assert_eq!(receive(&mut telnet, &asked).1, [IAC, WONT, 24, IAC, DONT, 31, IAC, WONT, 24]);
    }

    #[test]
    fn every_byte_of_the_guest_arrives_wherever_pieces_end() {
        let stream = [
            &GREETING[..],
            b"a",
            &[IAC, IAC, IAC, SUBNEGOTIATION, 24, 1, IAC, IAC, IAC, SUBNEGOTIATION_END],
            b"b\r\n",
            &[IAC, 241, 0, 254],
        ]
        .concat();
        let whole = receive(&mut Telnet::default(), &stream);
        assert_eq!(whole.0, [&[b'a', IAC][..], b"b\r\n", &[0, 254]].concat());
        let (mut telnet, mut shown, mut answer) = (Telnet::default(), vec![], vec![]);
        for byte in stream {
            telnet.receive(&[byte], &mut shown, &mut answer);
        }
        assert_eq!((shown, answer), whole);
    }

    #[test]
    fn what_is_typed_is_sent_as_it_is() {
        assert_eq!(Telnet::send(b"root\r"), b"root\r");
        assert_eq!(Telnet::send(&[1, IAC, 2]), [1, IAC, IAC, 2]);
    }
}
