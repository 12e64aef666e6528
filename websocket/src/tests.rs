use tokio::io::DuplexStream;

use super::*;

/// Returns a masked frame of a client.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mask = [0x12, 0x34, 0x56, 0x78];
    let mut frame = vec![first];
    match payload.len() {
        length @ ..126 => frame.push(0x80 | u8::try_from(length).unwrap()),
        length => {
            frame.push(0x80 | 126);
            frame.extend(u16::try_from(length).unwrap().to_be_bytes());
        }
    }
    frame.extend(mask);
    let mut payload = payload.to_vec();
    apply_mask(&mut payload, mask, 0);
    frame.extend(payload);
    frame
}

/// Starts the relay of a server, and returns the connections of the client and of the peer.
fn start() -> (DuplexStream, DuplexStream) {
    let ((user, client), (guest, peer)) = (tokio::io::duplex(1 << 20), tokio::io::duplex(1 << 20));
    tokio::spawn(relay(client, peer, Role::Server));
    (user, guest)
}

async fn read(stream: &mut DuplexStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).await.unwrap();
    bytes
}

/// Returns the bytes until the end of a connection.
async fn read_all(mut stream: DuplexStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    bytes
}

#[tokio::test]
async fn carries_bytes_in_both_directions_whatever_the_frames() {
    let (mut user, mut guest) = start();
    user.write_all(&frame(0x82, b"ls\n")).await.unwrap();
    assert_eq!(read(&mut guest, 3).await, b"ls\n");
    // A message in three frames, with a ping in between, byte by byte.
    let long = vec![b'x'; 40_000];
    let parts = [
        frame(0x01, b"a"),
        frame(0x89, b"alive?"),
        frame(0x00, &long),
        frame(0x8a, b"unsolicited"),
        frame(0x80, b""),
        frame(0x82, b"b"),
    ];
    for byte in parts.concat() {
        user.write_all(&[byte]).await.unwrap();
    }
    assert_eq!(read(&mut guest, long.len() + 2).await, [b"a".as_slice(), &long, b"b"].concat());
    assert_eq!(read(&mut user, 8).await, b"\x8a\x06alive?");
    guest.write_all(b"text").await.unwrap();
    assert_eq!(read(&mut user, 6).await, b"\x82\x04text");
    guest.write_all(&[7; 300]).await.unwrap();
    assert_eq!(read(&mut user, 4).await, b"\x82\x7e\x01\x2c");
    assert_eq!(read(&mut user, 300).await, [7; 300]);
}

#[tokio::test]
async fn ends_when_either_side_closes() {
    let (user, mut guest) = start();
    guest.write_all(b"bye").await.unwrap();
    drop(guest);
    assert_eq!(read_all(user).await, b"\x82\x03bye\x88\x02\x03\xe8");
    let (mut user, guest) = start();
    user.write_all(&frame(0x88, b"\x03\xe8")).await.unwrap();
    assert_eq!(read_all(guest).await, b"");
    assert_eq!(read_all(user).await, b"\x88\x02\x03\xe8");
    let (user, guest) = start();
    drop(user);
    assert_eq!(read_all(guest).await, b"");
}

#[tokio::test]
async fn rejects_frames_that_are_not_valid() {
    let unmasked = b"\x82\x01a".to_vec();
    let mut oversized_ping = frame(0x89, &[0; 125]);
    oversized_ping[1] = 0x80 | 126;
    let endless = [b"\x82\xff".as_slice(), &[0xff; 8], &[0; 4]].concat();
    for (name, bytes) in [
        ("unmasked", unmasked),
        ("reserved bit", frame(0xc2, b"a")),
        ("unknown opcode", frame(0x83, b"a")),
        ("unknown control frame", frame(0x8b, b"a")),
        ("fragmented ping", frame(0x09, b"a")),
        ("continuation of nothing", frame(0x80, b"a")),
        ("message within a message", [frame(0x02, b""), frame(0x82, b"a")].concat()),
        ("oversized ping", oversized_ping),
        ("length", endless),
    ] {
        let (mut user, guest) = start();
        user.write_all(&bytes).await.unwrap();
        assert_eq!(read_all(guest).await, b"", "{name}");
        assert_eq!(read_all(user).await, b"\x88\x02\x03\xea", "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn disconnects_a_client_that_sends_no_sign_of_life() {
    let (user, guest) = start();
    let started = Instant::now();
    assert_eq!(read_all(guest).await, b"");
    assert!((90..=150).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    assert_eq!(read_all(user).await, b"\x89\x00\x89\x00\x89\x00\x88\x02\x03\xe8");
}

/// Connects the relays of a client and of a server. Returns the connections of the user and of the guest, and why the client's
/// relay ends.
fn start_both() -> (DuplexStream, DuplexStream, tokio::task::JoinHandle<RelayEnd>) {
    let (client, server) = tokio::io::duplex(1 << 16);
    let ((user, local), (guest, peer)) = (tokio::io::duplex(1 << 16), tokio::io::duplex(1 << 16));
    tokio::spawn(relay(server, peer, Role::Server));
    (user, guest, tokio::spawn(relay(client, local, Role::Client)))
}

#[tokio::test]
async fn client_and_server_understand_each_other() {
    let (mut user, mut guest, end) = start_both();
    let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(50_000).collect();
    user.write_all(&bytes).await.unwrap();
    assert_eq!(read(&mut guest, bytes.len()).await, bytes);
    guest.write_all(&bytes).await.unwrap();
    assert_eq!(read(&mut user, bytes.len()).await, bytes);
    guest.write_all(b"bye").await.unwrap();
    drop(guest);
    assert_eq!(read_all(user).await, b"bye", "all bytes before the end");
    assert_eq!(end.await.unwrap(), RelayEnd::Closed);
    let (user, guest, end) = start_both();
    drop(user);
    assert_eq!(read_all(guest).await, b"");
    assert_eq!(end.await.unwrap(), RelayEnd::PeerClosed);
}

#[tokio::test]
async fn client_tells_a_lost_connection_from_a_closed_one() {
    for (sent, expected) in [
        (b"\x82\x02hi".as_slice(), RelayEnd::Lost),
        (b"\x82\x05hi", RelayEnd::Lost),
        (b"\x88\x00", RelayEnd::Closed),
        (b"\x88\x02\x03\xe8", RelayEnd::Closed),
        (b"\x88\x02\x03\xf3", RelayEnd::ClosedWith("status 1011".into())),
        (b"\x88\x04\x03\xe8no", RelayEnd::ClosedWith("no".into())),
        (b"\x82\x82masked", RelayEnd::InvalidFrame),
    ] {
        let ((mut server, client), (_user, local)) = (tokio::io::duplex(64), tokio::io::duplex(64));
        server.write_all(sent).await.unwrap();
        drop(server);
        assert_eq!(relay(client, local, Role::Client).await, expected, "{sent:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn silent_connection_stays_open_for_an_hour() {
    let (user, guest, end) = start_both();
    let started = Instant::now();
    let (_, _, end) = tokio::join!(read_all(user), read_all(guest), end);
    assert_eq!(started.elapsed().as_secs(), 3600);
    let reason = "no data was transferred for an hour";
    assert!([RelayEnd::Idle, RelayEnd::ClosedWith(reason.into())].contains(&end.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn failed_peer_is_not_a_closed_one() {
    let peer = tokio::io::join(FailingReader, tokio::io::sink());
    let (client, server) = tokio::io::duplex(64);
    let (_user, local) = tokio::io::duplex(64);
    let ends = tokio::join!(relay(server, peer, Role::Server), relay(client, local, Role::Client));
    assert_eq!(ends.0, RelayEnd::PeerFailed);
    assert_eq!(ends.1, RelayEnd::ClosedWith("the connection to the node of the instance failed".into()));
}

/// A connection that fails.
struct FailingReader;

impl AsyncRead for FailingReader {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        _: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
    }
}
