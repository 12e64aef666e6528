use tokio::io::DuplexStream;

use super::*;

#[test]
fn escape_closes_the_console_only_when_typed() {
    assert_eq!(until_escape(b"ls\r"), (&b"ls\r"[..], false));
    assert_eq!(until_escape(b"ab\x1dcd"), (&b"ab"[..], true));
    assert_eq!(script_lines(b"ab\x1d\n").collect::<Vec<_>>(), [b"ab\x1d\r"]);
}

#[test]
fn script_lines_are_sent_one_by_one() {
    let typed: Vec<Vec<u8>> = script_lines(b"root\n\nls").collect();
    assert_eq!(typed, [&b"root\r"[..], b"\r", b"ls"]);
    assert_eq!(script_lines(b"").count(), 0);
}

/// Opens a console session. Returns it with the guest's side of the connection and a channel for typed keys.
fn open_console(
    interactive: bool,
) -> (ConsoleSession<DuplexStream, Vec<u8>>, DuplexStream, mpsc::Sender<Vec<u8>>) {
    let (stream, guest) = tokio::io::duplex(1024);
    let (keys, input) = mpsc::channel(4);
    let console = ConsoleSession {
        stream,
        input,
        out: vec![],
        interactive,
        linger: Duration::from_millis(50),
        raw: None,
    };
    (console, guest, keys)
}

#[tokio::test]
async fn typed_keys_reach_the_guest_until_the_escape() {
    let (mut console, mut guest, keys) = open_console(true);
    let guest = async move {
        guest.write_all(b"login: ").await.unwrap();
        keys.send(b"root\r".to_vec()).await.unwrap();
        keys.send(b"ls\x1drest".to_vec()).await.unwrap();
        let mut all = vec![];
        guest.read_to_end(&mut all).await.unwrap();
        all
    };
    let session = async move {
        let end = console.run().await.unwrap();
        (end, console.out)
    };
    let ((end, shown), all) = tokio::join!(session, guest);
    assert_eq!((end, shown.as_slice()), (SessionEnd::Left, &b"login: "[..]));
    assert_eq!(all, b"root\rls");
}

#[tokio::test]
async fn script_ends_when_it_is_sent_and_the_guest_is_silent() {
    let (mut console, mut guest, keys) = open_console(false);
    let guest = async move {
        guest.write_all(b"login: ").await.unwrap();
        keys.send(b"root\n".to_vec()).await.unwrap();
        drop(keys);
        let mut got = [0; 5];
        guest.read_exact(&mut got).await.unwrap();
        guest.write_all(b"# ").await.unwrap();
        (got, guest)
    };
    let session = async {
        let end = console.run().await.unwrap();
        (end, console.out.clone())
    };
    let ((end, shown), (got, _guest)) = tokio::join!(session, guest);
    assert_eq!((end, shown.as_slice(), &got), (SessionEnd::Silent, &b"login: # "[..], b"root\r"));
}

#[tokio::test]
async fn closed_connection_ends_the_session() {
    let (mut console, guest, _keys) = open_console(true);
    drop(guest);
    assert_eq!(console.run().await.unwrap(), SessionEnd::Closed);
}
