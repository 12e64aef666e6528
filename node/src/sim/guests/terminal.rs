//! Terminals of simulated guests. They print the command line and every change of their size, echo input, and exit with 130
//! after Ctrl-C and with 0 after Ctrl-D.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use muster_types::guest::{GuestError, GuestFuture, GuestTerminal, TerminalInput, TerminalOutput};
use muster_types::terminal::{TerminalRequest, TerminalSize};
use tokio::sync::{mpsc, watch};

use super::guest::{ConnectionState, disconnected};
use super::{CONNECTION_LOST, unreachable};

const INTERRUPT: u8 = 3;
const END_OF_TRANSMISSION: u8 = 4;

type Output = Result<TerminalOutput, GuestError>;

enum Input {
    Bytes(Bytes),
    Size(TerminalSize),
}

struct InputSender(mpsc::Sender<Input>);

impl InputSender {
    fn send_input(&self, input: Input) -> GuestFuture<'_, ()> {
        Box::pin(async move { self.0.send(input).await.map_err(|_| unreachable("the session has ended")) })
    }
}

impl TerminalInput for InputSender {
    fn send(&mut self, bytes: Bytes) -> GuestFuture<'_, ()> {
        self.send_input(Input::Bytes(bytes))
    }

    fn resize(&mut self, size: TerminalSize) -> GuestFuture<'_, ()> {
        self.send_input(Input::Size(size))
    }
}

struct OutputReceiver(mpsc::Receiver<Output>);

impl Stream for OutputReceiver {
    type Item = Output;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Output>> {
        self.0.poll_recv(context)
    }
}

/// Opens a terminal whose session ends with the connection to the agent.
pub(super) fn open(
    request: &TerminalRequest,
    mut connection: watch::Receiver<ConnectionState>,
    session: u64,
) -> GuestTerminal {
    let (input_sender, input) = mpsc::channel(4);
    let (output, output_receiver) = mpsc::channel(4);
    let greeting = format!("{} in {}\r\n{}", request.command_line, request.term, size_line(request.size));
    tokio::spawn(async move {
        let last = tokio::select! {
            code = run(greeting, input, &output) => code.map(TerminalOutput::Exited),
            () = disconnected(&mut connection, session) => Err(unreachable(CONNECTION_LOST)),
            () = output.closed() => return,
        };
        let _ = output.send(last).await;
    });
    GuestTerminal {
        input: Box::new(InputSender(input_sender)),
        output: Box::pin(OutputReceiver(output_receiver)),
    }
}

fn size_line(size: TerminalSize) -> String {
    format!("{} {}\r\n", size.rows, size.columns)
}

/// Runs the simulated command, and returns its exit code.
async fn run(
    greeting: String,
    mut input: mpsc::Receiver<Input>,
    output: &mpsc::Sender<Output>,
) -> Result<i32, GuestError> {
    let mut printed = Bytes::from(greeting);
    loop {
        // A failure means that the reader has left, which ends the session.
        let _ = output.send(Ok(TerminalOutput::Bytes(printed))).await;
        printed = match input.recv().await {
            None => std::future::pending().await,
            Some(Input::Bytes(bytes)) if bytes.contains(&INTERRUPT) => return Ok(130),
            Some(Input::Bytes(bytes)) if bytes.contains(&END_OF_TRANSMISSION) => return Ok(0),
            Some(Input::Bytes(bytes)) => bytes,
            Some(Input::Size(size)) => size_line(size).into(),
        };
    }
}
